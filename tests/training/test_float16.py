"""float16 with a loss scaler: overflows are left out and counted, the clock goes on, and a real NaN still stops.

Accelerate does not offer float16 on a CPU, torch does: the scaler and the autocast of these tests are torch's own, put
where Accelerate puts them on a GPU. Without that, `training.fp16` on a CPU is refused.
"""

import math

import accelerate
import pytest
import torch

from olmo_hf.errors import ConfigError, TrainingError
from olmo_hf.training.args import SchedulerArgs
from olmo_hf.training.schedulers import learning_rate_at
from tests.training.small import logged, ragged_rows, tiny, trainer_of

STEPS = 6
SCHEDULE = SchedulerArgs(units="tokens", warmup=256, warmup_min_lr=0.0)


def run(folder, **settings):
    chosen = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, **settings}
    return trainer_of(folder, tiny(), ragged_rows(4 * STEPS), learning_rate=1e-3, scheduler=SCHEDULE, **chosen)


@pytest.fixture
def scale(monkeypatch):
    """Lets Accelerate use float16 on the CPU; returns the settings of the scaler, which a test may change."""
    settings = {"init_scale": 2.0**10, "growth_interval": 1000}
    original = accelerate.Accelerator.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self.mixed_precision == "fp16":
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu", **settings)

    monkeypatch.setattr(accelerate.Accelerator, "__init__", init)
    return settings


def test_on_a_cpu_it_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"training\.fp16: found true on the device `cpu`"):
        run(tmp_path, fp16=True)


def test_losses_follow_float32_and_masters_stay_in_it(tmp_path, scale):
    exact, half = run(tmp_path), run(tmp_path, fp16=True)
    exact.train()
    half.train()
    # Rounding to float16 is 2**-11 of a value; a loss averages it over the tokens.
    one, other = (logged(trainer, "train/CrossEntropyLoss") for trainer in (exact, half))
    assert list(other.values()) == pytest.approx(list(one.values()), rel=2**-11)
    assert one != other
    assert logged(half, "optim/total_grad_norm")[1] == pytest.approx(
        logged(exact, "optim/total_grad_norm")[1], rel=2**-6
    ), "the norm is that of the gradient, not of the scaled one"
    assert logged(half, "train/skipped_steps")[STEPS] == 0
    assert all(parameter.dtype == torch.float32 for parameter in half.model.parameters())
    states = half.inner_optimizer.state.values()
    assert all(state["exp_avg"].dtype == torch.float32 for state in states)


def test_overflows_are_left_out_and_counted_and_the_clock_goes_on(tmp_path, scale):
    scale.update(init_scale=2.0**26, backoff_factor=2.0**-8)  # the first gradients cannot be held
    trainer = run(tmp_path, fp16=True, max_grad_norm_ratio=2.0)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    skipped = logged(trainer, "train/skipped_steps")
    last = skipped[STEPS]
    assert 1 <= last < STEPS - 1
    assert [skipped[step] for step in range(1, STEPS + 1)] == [min(step, last) for step in range(1, STEPS + 1)]
    losses = logged(trainer, "train/CrossEntropyLoss")
    assert [math.isnan(losses[step]) for step in losses] == [step <= last for step in losses]
    rates = logged(trainer, "optim/learning_rate_group0")
    for step in range(last + 2, STEPS + 1):
        assert rates[step] == learning_rate_at(SCHEDULE, peak_lr=1e-3, current=64 * step, max_=64 * STEPS)
    assert logged(trainer, "throughput/total_tokens")[STEPS] == 64 * STEPS
    assert trainer.inner_optimizer.state[trainer.model.lm_head.weight]["step"] == STEPS - last
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert any(not torch.equal(parameter, before[name]) for name, parameter in trainer.model.named_parameters())
    assert all(norm.isfinite() for norm in trainer._clipper.running_norms.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: Accelerate's own float16")
@pytest.mark.gpu
def test_on_a_gpu_accelerates_own_scaler_is_used(tmp_path):
    exact, half = run(tmp_path / "exact", use_cpu=False), run(tmp_path / "half", use_cpu=False, fp16=True)
    exact.train()
    half.train()
    one, other = (logged(trainer, "train/CrossEntropyLoss") for trainer in (exact, half))
    done = [step for step, loss in other.items() if not math.isnan(loss)]  # it begins at a scale of 2**16
    assert len(done) > STEPS / 2
    skipped = STEPS - len(done)
    assert logged(half, "train/skipped_steps")[STEPS] == skipped
    if not skipped:
        assert list(other.values()) == pytest.approx(list(one.values()), rel=2**-10)
    assert all(parameter.dtype == torch.float32 for parameter in half.model.parameters())


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_a_smaller_scale_does_not_mend_stops_the_run(tmp_path, scale, where):
    trainer = run(tmp_path, fp16=True)
    weight = trainer.model.lm_head.weight
    if where == "loss":
        with torch.no_grad():
            weight[3, 0] = torch.nan
        expected = "step 1, rank 0"
    else:
        weight.register_hook(lambda gradient: gradient * torch.nan)
        scale_steps = 11  # from 2**10 down to 1, each by half
        trainer.args.max_steps = 20
        trainer.train_dataset = ragged_rows(80)
        expected = f"step {scale_steps + 1}, rank 0"
    with pytest.raises(TrainingError, match=f"{expected}: the update is not a number"):
        trainer.train()


def test_the_scale_survives_a_restart(tmp_path, scale):
    scale.update(growth_interval=2)
    first = run(tmp_path, fp16=True, stop_step=3, save_strategy="steps", save_steps=100)
    first.train()
    found = first.accelerator.scaler.state_dict()
    assert (found["scale"], found["_growth_tracker"]) == (2.0**11, 1)
    second = run(tmp_path, fp16=True, stop_step=4, ignore_data_skip=True)
    second.train(resume_from_checkpoint=True)
    assert second.accelerator.scaler.get_scale() == 2.0**12
