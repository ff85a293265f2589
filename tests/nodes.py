"""Nodes on one machine: `launch/node.sh` once for each, over loopback, as separate launches that may be killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests import runs
from tests.served import free_port

NODES, PROCESSES = 2, 2


class Nodes:
    """Two nodes of two processes that train one run; what they print goes to `node{N}.txt` beside the configuration.

    Args:
        config: the run's YAML.
        words: further settings of the run.
        accelerate_config: file in `accelerate_configs/`.
        env: further environment variables.
    """

    def __init__(
        self,
        config: Path,
        *words: str,
        accelerate_config: str = "cpu_nodes_fsdp2.yaml",
        nodes: int = NODES,
        **env: str,
    ):
        self.directory = config.parent
        port = str(free_port())
        self.nodes = []
        for node in range(nodes):
            environment = runs.environment(
                NODE_RANK=str(node),
                NUM_NODES=str(nodes),
                PROCESSES_PER_NODE=str(PROCESSES),
                MAIN_PORT=port,
                LOG_DIR=str(self.directory / "logs"),
                PYTHON=sys.executable,
                RETRY_SECONDS="3",
                **env,
            )
            environment.pop("ACCELERATE_USE_CPU")  # as a user types it: the configuration says that this is a CPU
            program = ["launch/node.sh", f"accelerate_configs/{accelerate_config}", str(config), *words]
            with open(self.directory / f"node{node}.txt", "ab") as log:
                self.nodes.append(
                    subprocess.Popen(
                        program, cwd=runs.ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
                    )
                )

    def text(self, node: int) -> str:
        """What a node has printed."""
        return (self.directory / f"node{node}.txt").read_text(errors="replace")

    def until(self, condition: Callable[[], bool], timeout_seconds: float = 150) -> None:
        """Wait for a moment in the run."""
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            assert all(node.poll() is None for node in self.nodes), self.text(0)[-3000:]
            assert time.monotonic() < deadline, self.text(0)[-3000:]
            time.sleep(0.05)

    def processes(self, node: int) -> list[int]:
        """The launcher of a node and its training processes."""
        return descendants(self.nodes[node].pid)

    def kill(self, node: int) -> None:
        """`kill -9` everything that trains on a node; only the script that looks after it is left."""
        for process in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def wait(self, timeout_seconds: float = 240) -> list[int]:
        """Exit codes of the nodes."""
        deadline = time.monotonic() + timeout_seconds
        try:
            return [node.wait(timeout=max(deadline - time.monotonic(), 1)) for node in self.nodes]
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join(self.text(node)[-3000:] for node in range(len(self.nodes)))) from None
        finally:
            self.close()

    def close(self) -> None:
        """Nothing is left running."""
        for node in self.nodes:
            for process in [*descendants(node.pid), node.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            node.wait()


def train(directory: Path, *, steps: int, kill: int | None) -> tuple[Path, list[str]]:
    """One run of two nodes; returns its directory and what happened."""
    config = runs.write_run(directory, dropout=0.0, max_duration=steps, save_interval=None, save_interval_ephemeral=5)
    began, told = time.monotonic(), []

    def tell(what: str) -> None:
        told.append(f"{time.monotonic() - began:6.1f} s  {what}")

    nodes, run_dir = Nodes(config), directory / "run"
    try:
        if kill is not None:
            nodes.until(lambda: steps // 2 + 2 in runs.logged_steps(run_dir))  # between two checkpoints
            nodes.kill(kill)
            count = len(runs.logged_steps(run_dir))
            tell(
                f"step {runs.logged_steps(run_dir)[-1]}: kill -9 of all that trains on node {kill}, launcher included"
            )
            nodes.until(lambda: len(runs.logged_steps(run_dir)) > count + 2)  # one may have been under way
            tell(f"training goes on, step {runs.logged_steps(run_dir)[-1]}")
        codes = nodes.wait()
    finally:
        nodes.close()
    tell(f"the nodes end with {codes}")
    assert codes == [0, 0], nodes.text(0)[-3000:]
    return run_dir, told


def descendants(process: int) -> list[int]:
    """All children of a process and theirs."""
    found = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
    return found
