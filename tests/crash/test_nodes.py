"""`launch/node.sh`: nodes that are killed come back by themselves, and requests to stop lead to a checkpoint.

Everything here is started as a user starts it: separate launches over loopback, gloo, FSDP2 on two nodes.
"""

import os
import signal
from pathlib import Path

import pytest

from tests import runs
from tests.nodes import Nodes, descendants, train

STEPS = 40


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("undisturbed"), steps=STEPS, kill=None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_node_comes_back_and_nothing_is_lost(undisturbed: Path, tmp_path: Path, node: int) -> None:
    """Node 0 holds the store through which the nodes find each other."""
    killed, told = train(tmp_path, steps=STEPS, kill=node)
    assert any("training goes on" in line for line in told)
    runs.same_run(killed, undisturbed, range(1, STEPS + 1))


def one_node(directory: Path, **env: str) -> Nodes:
    config = runs.write_run(directory, dropout=0.0, max_duration=100_000, save_interval=None)
    return Nodes(config, accelerate_config="cpu_ddp.yaml", nodes=1, **env)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 138), (signal.SIGTERM, 143)])
def test_a_scheduler_that_signals_everything_it_sees(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """The script, the launcher and both training processes get the signal, as from SLURM."""
    nodes, run_dir = one_node(tmp_path), tmp_path / "run"
    nodes.until(lambda: len(runs.logged_steps(run_dir)) > 3)
    script = nodes.nodes[0].pid
    for process in [script, *descendants(script)]:
        os.kill(process, number)
    assert nodes.wait(timeout_seconds=60) == [code]
    step = max(runs.logged_steps(run_dir))
    assert (run_dir / "latest").resolve().name == f"checkpoint-{step}"
    assert f"SIG{number.name.removeprefix('SIG')}" in nodes.text(0)
    logs = sorted((tmp_path / "logs" / "node0" / "launch1").glob("*/attempt_0/*/stderr.log"))
    assert len(logs) == 2, "one log per rank"


@pytest.mark.slow
def test_a_signal_to_the_script_alone_reaches_the_training(tmp_path: Path) -> None:
    nodes, run_dir = one_node(tmp_path), tmp_path / "run"
    nodes.until(lambda: len(runs.logged_steps(run_dir)) > 3)
    os.kill(nodes.nodes[0].pid, signal.SIGUSR1)
    assert nodes.wait(timeout_seconds=60) == [138]
    assert (run_dir / "latest").resolve().name == f"checkpoint-{max(runs.logged_steps(run_dir))}"


@pytest.mark.slow
def test_a_killed_process_is_restarted_by_the_launcher(tmp_path: Path) -> None:
    """One of two training processes; the launcher itself stays."""
    config = runs.write_run(tmp_path, dropout=0.0, max_duration=60, save_interval=None)
    nodes, run_dir = Nodes(config, accelerate_config="cpu_ddp.yaml", nodes=1), tmp_path / "run"
    nodes.until(lambda: len(runs.logged_steps(run_dir)) > 10)
    launcher = descendants(nodes.nodes[0].pid)[0]
    os.kill(descendants(launcher)[-1], signal.SIGKILL)
    assert nodes.wait(timeout_seconds=200) == [0]
    assert len(list((tmp_path / "logs" / "node0" / "launch1").glob("*/attempt_1"))) == 1
    assert len(runs.losses(run_dir)) == 60


@pytest.mark.slow
def test_an_error_for_people_is_not_tried_again(tmp_path: Path) -> None:
    config = runs.write_run(tmp_path)
    nodes = Nodes(config, "--training.learning_rat=1", accelerate_config="cpu_ddp.yaml", nodes=1)
    assert nodes.wait(timeout_seconds=120) == [2]
    assert "did you mean `learning_rate`" in nodes.text(0)
    assert nodes.text(0).count("launch 1 of at most") == 1
    assert "launch 2" not in nodes.text(0)
