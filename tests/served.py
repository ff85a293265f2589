"""Ranks that stay: processes that train one run after another, because starting a process takes longer than a run.

`Ranks` starts them; each runs this file, reads a command line from its input and answers with the exit code.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tests import runs

if TYPE_CHECKING:
    from tests.forks import Forked, Forks


def serve(requests: Iterable[str], answers: TextIO) -> None:
    """Run the command lines that come in, until there are no more."""
    import train_hf

    for line in requests:
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


class Interpreter:
    """A rank in an interpreter of its own."""

    def __init__(self, env: dict[str, str], directory: Path | None):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "tests.served"]
        self._process = subprocess.Popen(command, cwd=directory, env=runs.environment(**env), **pipes)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.requests, self.answers = self._process.stdin, self._process.stdout

    def wait(self) -> None:
        """Until it has ended."""
        self._process.wait(timeout=60)


class Ranks:
    """Processes that train together, under the launcher's environment variables.

    Args:
        count: number of ranks.
        forks: makes the processes. None: interpreters of their own.
        directories: working directory of each rank. None: this one.
        env: further variables, such as those that ask for FSDP.
    """

    def __init__(self, count: int, forks: "Forks | None" = None, *, directories: list[Path] | None = None, **env: str):
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
        self.processes: list[Interpreter | Forked] = []
        for rank in range(count):
            local = rank if directories is None else 0
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(local)} if count > 1 else {}
            directory = None if directories is None else directories[rank]
            start = Interpreter if forks is None else forks.serve
            self.processes.append(start({**own, **env}, directory))

    def codes(self, config: Path, *words: str) -> list[int]:
        """Train with this configuration; exit code of every rank."""
        for process in self.processes:
            request = {"log": str(config.parent / "log.txt"), "words": [str(config), *words]}
            process.requests.write(json.dumps(request) + "\n")
            process.requests.flush()
        answers = [process.answers.readline().strip() for process in self.processes]
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
            process.requests.close()
        for process in self.processes:
            process.wait()


if __name__ == "__main__":
    serve(sys.stdin, os.fdopen(os.dup(1), "w"))
