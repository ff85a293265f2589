"""What the trainer hands to callbacks, and a clock that goes when it is told to."""

from pathlib import Path

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import integration_utils

from tests import runs
from tests.forks import Forks


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def arguments(tmp_path: Path) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path / "unused"), use_cpu=True, report_to=[])


@pytest.fixture
def state() -> TrainerState:
    state = TrainerState()
    state.max_steps = 10
    state.is_world_process_zero = True
    return state


@pytest.fixture
def control() -> TrainerControl:
    return TrainerControl()


@pytest.fixture(scope="session")
def undisturbed(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody stops or evaluates, with nothing on but the metrics file."""
    path = runs.write_run(tmp_path_factory.mktemp("undisturbed"), save_interval_ephemeral=None)
    names = ("speed_monitor", "garbage_collector", "heartbeat", "memory", "loss_spike", "cancellation", "data_indices")
    forks.run(path, *(f"--callbacks.{name}=null" for name in names))
    return path.parent / "run"


@pytest.fixture(autouse=True)
def tracker_settings_do_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_DIR", "WANDB_RUN_ID", "WANDB_RESUME", "TENSORBOARD_LOGGING_DIR"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    monkeypatch.setattr(integration_utils, "rewrite_logs", integration_utils.rewrite_logs)
