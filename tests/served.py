"""Ranks that stay: processes that train one run after another, because starting a process takes longer than a run.

`Ranks` starts them; each runs this file, reads a command line from its input and answers with the exit code.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests import runs


def serve() -> None:
    """Run the command lines that come in, until there are no more."""
    import train_hf

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        code = train_hf.run_and_report(train_hf.main, request["words"])
        sys.stdout.flush()
        sys.stderr.flush()
        answers.write(f"{code}\n")
        answers.flush()


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Ranks:
    """Processes that train together, under the launcher's environment variables.

    Args:
        count: number of ranks.
        directories: working directory of each rank. None: this one.
        env: further variables, such as those that ask for FSDP.
    """

    def __init__(self, count: int, *, directories: list[Path] | None = None, **env: str):
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.served"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=directories[rank] if directories is not None else None,
                env=runs.environment(
                    **(rendezvous if count > 1 else {}),
                    **(
                        {"RANK": str(rank), "LOCAL_RANK": str(rank if directories is None else 0)} if count > 1 else {}
                    ),
                    **env,
                ),
            )
            for rank in range(count)
        ]

    def codes(self, config: Path, *words: str) -> list[int]:
        """Train with this configuration; exit code of every rank."""
        for process in self.processes:
            assert process.stdin is not None
            request = {"log": str(config.parent / "log.txt"), "words": [str(config), *words]}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        answers = []
        for process in self.processes:
            assert process.stdout is not None
            answers.append(process.stdout.readline().strip())
        assert all(answers), (config.parent / "log.txt").read_text(errors="replace")[-4000:]
        return [int(answer) for answer in answers]

    def run(self, config: Path, *words: str) -> str:
        """Train to the end; returns what was printed by all launches with this configuration so far."""
        codes = self.codes(config, *words)
        text = (config.parent / "log.txt").read_text(errors="replace")
        assert not any(codes), text[-4000:]
        return text

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            process.wait(timeout=60)


if __name__ == "__main__":
    serve()
