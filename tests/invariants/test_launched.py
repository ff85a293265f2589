"""The launch lines of the accelerate configs: what can run on a CPU gives the numbers of one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs
from tests.nodes import Nodes

STEPS = 5


def launch(config: Path, accelerate_config: str) -> subprocess.CompletedProcess[str]:
    """As a user types it: nothing in the environment says that this is a CPU."""
    settings = runs.ROOT / "accelerate_configs" / accelerate_config
    program = [str(Path(sys.executable).with_name("accelerate")), "launch", "--config_file", str(settings)]
    environment = {k: v for k, v in runs.environment().items() if not k.startswith("ACCELERATE")}
    return subprocess.run(
        [*program, "train_hf.py", str(config)], cwd=runs.ROOT, env=environment, capture_output=True, text=True
    )


def train(directory: Path, accelerate_config: str) -> dict[int, tuple[float, float, float]]:
    config = runs.write_run(directory, dropout=0.0, max_duration=STEPS, save_interval_ephemeral=None)
    done = launch(config, accelerate_config)
    assert done.returncode == 0, done.stderr[-3000:]
    return runs.losses(directory / "run")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, float, float]]:
    return train(tmp_path_factory.mktemp("one"), "cpu.yaml")


def same(found: dict[int, tuple[float, float, float]], one: dict[int, tuple[float, float, float]]) -> None:
    assert list(one) == list(found) == list(range(1, STEPS + 1))
    for step, (loss, norm, rate) in one.items():
        assert found[step][0] == pytest.approx(loss, rel=1e-5)
        assert found[step][1] == pytest.approx(norm, rel=1e-4)  # AdamW magnifies roundings, as test_split tells
        assert found[step][2] == rate


@pytest.mark.takes(22, "two launch lines as users type them: five interpreters that import torch")
@pytest.mark.skipif(os.cpu_count() == 1, reason="two processes want two cores")
@pytest.mark.parametrize(
    "name",
    [
        "cpu_ddp.yaml",
        pytest.param("cpu_fsdp2.yaml", marks=pytest.mark.slow),
        pytest.param("cpu_fsdp2_shard_grad_op.yaml", marks=pytest.mark.slow),
        pytest.param("cpu_hsdp.yaml", marks=pytest.mark.slow),
    ],
)
def test_launched_processes_give_the_losses_of_one(
    one: dict[int, tuple[float, float, float]], tmp_path: Path, name: str
) -> None:
    same(train(tmp_path, name), one)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_two_nodes_give_the_losses_of_one_process(
    one: dict[int, tuple[float, float, float]], tmp_path: Path, backend: str
) -> None:
    config = runs.write_run(tmp_path, dropout=0.0, max_duration=STEPS, save_interval_ephemeral=None)
    assert Nodes(config, RDZV_BACKEND=backend).wait() == [0, 0]
    same(runs.losses(tmp_path / "run"), one)


def test_every_file_for_cpus_is_launched_here() -> None:
    files = {path.name for path in (runs.ROOT / "accelerate_configs").glob("cpu*.yaml")}
    source = Path(__file__).read_text(encoding="utf-8") + (runs.ROOT / "tests" / "nodes.py").read_text("utf-8")
    assert all(f'"{name}"' in source for name in files)
