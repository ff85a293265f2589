"""How often a step waits for the device: once, to know that the update is a number before it happens.

Every read of a tensor by Python (`item`, `tolist`, `bool`, `float`) ends in `aten::_local_scalar_dense`, and a list of
many in a copy to the CPU; both are counted as the dispatcher sees them.
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from olmo_hf.data.memmap import MemMapDataset
from tests.training.small import tiny, trainer_of

STEPS, LOGGED = 8, (4, 8)


class Reads(TorchDispatchMode, TrainerCallback):
    """Counts reads by Python, step by step: those of the optimizer's own step, and all others."""

    def __init__(self):
        super().__init__()
        self.of_step, self.of_update = {}, {}
        self._now = Counter()
        self._where = "step"

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            self._now[self._where] += 1
        return function(*args, **(kwargs or {}))

    def on_step_begin(self, args, state, control, **kwargs):
        self._now.clear()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._where = "update"

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._where = "step"

    def on_step_end(self, args, state, control, **kwargs):
        self.of_step[state.global_step], self.of_update[state.global_step] = self._now["step"], self._now["update"]


@pytest.fixture
def dataset(tmp_path):
    tokens = torch.randint(128, (8 * STEPS * 16,), generator=torch.Generator().manual_seed(0)).numpy().astype("uint16")
    tokens.tofile(tmp_path / "tokens.npy")
    return MemMapDataset([tmp_path / "tokens.npy"], sequence_length=16, token_dtype="uint16")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"z_loss_weight": 1e-5, "max_grad_norm_ratio": 1.5}, id="z-and-adaptive-clipping"),
        pytest.param({"optimizer": "lion"}, id="lion"),
        pytest.param({"nan_policy": "skip", "optimizer_metrics_steps": 4}, id="skip-and-details"),
    ],
)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_step_that_is_not_logged_waits_once(tmp_path, dataset, settings, accumulation):
    reads = Reads()
    trainer = trainer_of(
        tmp_path / "run",
        tiny(),
        dataset,
        max_steps=STEPS,
        per_device_train_batch_size=8 // accumulation,
        gradient_accumulation_steps=accumulation,
        logging_steps=4,
        **settings,
    )
    trainer.add_callback(reads)
    with reads:
        trainer.train()
    found = {step: count for step, count in reads.of_step.items() if step > 1 and step not in LOGGED}
    assert found == dict.fromkeys(found, 1)
    assert len(found) == 5
    if settings.get("optimizer") == "lion":
        # torch's AdamW reads its counters here, which are in the CPU's memory; its fused form, used on a GPU, has none
        assert not any(reads.of_update.values())
