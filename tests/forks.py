"""Launches that start at once: a process that has imported everything forks for each of them.

A launch is a process of its own, in a session of its own, so that it can be killed like any other; only the seconds
that Python needs to import torch and transformers are saved. `Forks` is used by tests, this file is run by it.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import runs
from tests.served import free_port
from tests.served import serve as serve_requests


def serve() -> None:
    """Answer requests to start processes and to say how they ended."""
    import train_hf

    modules = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer: Any = None if pid == 0 else os.waitstatus_to_exitcode(status)
        else:
            _import_what_was_imported_last_time(modules)
            answer = os.fork()
            if answer == 0 and "requests" in request:
                _be_a_rank(request)
            elif answer == 0:
                _be_the_run(train_hf, request, modules)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _import_what_was_imported_last_time(modules: Path) -> None:
    if modules.is_file():
        for name in modules.read_text().split():
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        modules.unlink()


def _be_the_run(train_hf: Any, request: dict[str, Any], modules: Path) -> None:
    """In the child: never returns."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["env"])
    code = 1
    try:
        if request["prepare"]:
            importlib.import_module(request["prepare"])
        code = train_hf.run_and_report(train_hf.main, request["words"])
        if not modules.exists():
            modules.write_text("\n".join(n for n in sys.modules if n.split(".")[0] in ("torch", "transformers")))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _be_a_rank(request: dict[str, Any]) -> None:
    """In the child, as a rank that stays: never returns."""
    os.setsid()
    os.environ.update(request["env"])
    os.chdir(request["directory"])
    try:
        with open(request["requests"]) as requests, open(request["answers"], "w") as answers:
            serve_requests(requests, answers)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class Forked:
    """A rank that stays, as `served.Ranks` wants it."""

    def __init__(self, forks: "Forks", env: dict[str, str], directory: Path | None):
        pipes = [forks.directory / f"{uuid.uuid4().hex}-{name}" for name in ("requests", "answers")]
        for pipe in pipes:
            os.mkfifo(pipe)
        requests, answers = map(str, pipes)
        request = {"requests": requests, "answers": answers, "env": env, "directory": str(directory or Path.cwd())}
        self._forks, self._pid = forks, forks.ask(request)
        self.requests, self.answers = open(requests, "w"), open(answers)  # noqa: SIM115  (open as long as it lives)

    def wait(self) -> None:
        """Until it has ended."""
        Launch(self._forks, [self._pid], {}).wait(timeout_seconds=60)
        self.answers.close()


@dataclass
class Launch:
    """The processes of one launch."""

    forks: "Forks"
    pids: list[int]
    codes: dict[int, int]

    def running(self) -> bool:
        """Whether any of them is alive; learns how the others ended."""
        for pid in self.pids:
            if pid not in self.codes:
                answer = self.forks.ask({"wait": pid})
                if answer is not None:
                    self.codes[pid] = answer
        return len(self.codes) < len(self.pids)

    def signal(self, number: signal.Signals, ranks: Sequence[int] | None = None) -> None:
        """Send a signal to some ranks, or to all."""
        for rank, pid in enumerate(self.pids):
            if ranks is None or rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill(self) -> None:
        """`kill -9` all of them with their children, and see them gone."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.wait()

    def wait(self, timeout_seconds: float = 240) -> list[int]:
        """Exit codes of all ranks. As a launcher does, one rank's failure ends the others."""
        deadline = time.monotonic() + timeout_seconds
        while self.running():
            assert time.monotonic() < deadline, "the run does not end"
            if any(code != 0 for code in self.codes.values()):
                self._end_the_others()
            time.sleep(0.005)
        return [self.codes[pid] for pid in self.pids]

    def _end_the_others(self) -> None:
        deadline = time.monotonic() + 20
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.01)  # they fail by themselves in their next collective
        for pid in self.pids:
            if pid not in self.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def until(self, condition: Callable[[], bool], timeout_seconds: float = 120) -> None:
        """Wait for a moment in the run."""
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            assert self.running(), "the run ended before that moment"
            assert time.monotonic() < deadline, "the moment never came"
            time.sleep(0.002)


class Forks:
    """Starts launches.

    Args:
        directory: for a note on what to import, and for pipes.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks", str(directory / "modules.txt")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=runs.environment(),
        )

    def ask(self, request: dict[str, Any]) -> Any:
        """One question, one answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, config: Path, *words: str, ranks: int = 1, prepare: str = "", **env: str) -> Launch:
        """Start a run.

        Args:
            config: the YAML; `log.txt` beside it takes the output.
            words: further words of the command line.
            ranks: number of processes.
            prepare: module that each process imports first.
            env: further environment variables.
        """
        port = str(free_port())
        pids = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if ranks > 1 else {}
            request = {"log": str(config.parent / "log.txt"), "words": [str(config), *words], "prepare": prepare}
            pids.append(self.ask({**request, "env": {**own, **env}}))
        return Launch(self, pids, {})

    def run(self, config: Path, *words: str, ranks: int = 1, **env: str) -> str:
        """Train to the end; returns what was printed by all launches with this configuration so far."""
        codes = self.start(config, *words, ranks=ranks, **env).wait()
        text = (config.parent / "log.txt").read_text(errors="replace")
        assert not any(codes), text[-4000:]
        return text

    def serve(self, env: dict[str, str], directory: Path | None) -> Forked:
        """Start a rank that stays."""
        return Forked(self, env, directory)

    def close(self) -> None:
        """End the process that forks."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


if __name__ == "__main__":
    serve()
    os._exit(0)  # putting away what torch and transformers made takes seconds
