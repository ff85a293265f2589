"""Gradients that are no numbers, in the trainer: no weight is touched, the run stops in words or goes on counting.

The gradient of the head is spoilt by a hook on chosen steps; everything else is real.
"""

import math

import pytest
import torch
from transformers import TrainerCallback

from olmo_hf.errors import TrainingError
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training.args import SchedulerArgs
from olmo_hf.training.arguments import OlmoTrainingArguments
from olmo_hf.training.trainer import OlmoTrainer

STEPS = 6


class Weights(TrainerCallback):
    """Keeps a copy of the head after every step."""

    def __init__(self):
        self.after = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.after[0] = model.lm_head.weight.detach().clone()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.after[state.global_step] = model.lm_head.weight.detach().clone()


def build(folder, *, bad_steps=(), value=float("nan"), **settings):
    torch.manual_seed(0)
    config = OlmoHfConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    model = OlmoHfForCausalLM(config)
    tokens = torch.randint(128, (8 * STEPS, 16), generator=torch.Generator().manual_seed(1))
    args = OlmoTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        learning_rate=0.01,
        scheduler=SchedulerArgs(warmup=4, warmup_min_lr=0.0),
        **settings,
    )
    weights = Weights()
    trainer = OlmoTrainer(
        model, args, train_dataset=[{"input_ids": row, "labels": row} for row in tokens], callbacks=[weights]
    )
    model.lm_head.weight.register_hook(
        lambda gradient: gradient * value if trainer.state.global_step + 1 in bad_steps else gradient
    )
    return trainer, weights


def logged(trainer, name):
    """Values of a metric by step."""
    return {entry["step"]: entry[name] for entry in trainer.state.log_history if name in entry}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_stop_touches_no_weight_and_says_where(tmp_path, value):
    trainer, weights = build(tmp_path, bad_steps={3}, value=value)
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert "step 3, rank 0: the update is not a number" in str(caught.value)
    assert "No weight was changed" in str(caught.value)
    assert set(weights.after) == {0, 1, 2}
    assert torch.equal(trainer.model.lm_head.weight, weights.after[2])
    assert not list(tmp_path.glob("checkpoint-*"))


def test_skip_goes_on_as_if_the_batch_had_not_been_read(tmp_path):
    trainer, weights = build(tmp_path, bad_steps={2, 3}, nan_policy="skip")
    trainer.train()
    assert torch.equal(weights.after[2], weights.after[1])
    assert torch.equal(weights.after[3], weights.after[1])
    assert not torch.equal(weights.after[4], weights.after[3])
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert logged(trainer, "train/skipped_steps") == {1: 0, 2: 1, 3: 2, 4: 2, 5: 2, 6: 2}
    for name in ("train/CrossEntropyLoss", "loss"):
        values = logged(trainer, name)
        assert [step for step, value in values.items() if math.isnan(value)] == [2, 3], name
    # The clock of the schedule goes on: step 4 ends the warm-up.
    rates = logged(trainer, "optim/learning_rate_group0")
    assert [rates[step] for step in (1, 2, 3, 4)] == pytest.approx([0.0025, 0.005, 0.0075, 0.01], rel=1e-12)


def test_skip_gives_up_after_too_many_in_a_row(tmp_path):
    trainer, weights = build(tmp_path, bad_steps={2, 3, 4, 5}, nan_policy="skip", max_skipped_steps=2)
    with pytest.raises(TrainingError, match=r"step 4, rank 0.*after 2 updates skipped in a row"):
        trainer.train()
    assert torch.equal(trainer.model.lm_head.weight, weights.after[1])


def test_the_mean_of_several_steps_leaves_skipped_ones_out(tmp_path):
    whole, _ = build(tmp_path / "whole", bad_steps={2}, nan_policy="skip")
    whole.train()
    each = logged(whole, "train/CrossEntropyLoss")
    trainer, _ = build(tmp_path / "mean", bad_steps={2}, nan_policy="skip")
    trainer.args.logging_steps = trainer.state.logging_steps = 3
    trainer.train()
    means = logged(trainer, "train/CrossEntropyLoss")
    assert means[3] == pytest.approx((each[1] + each[3]) / 2, rel=1e-6)
    assert means[6] == pytest.approx((each[4] + each[5] + each[6]) / 3, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_details_on_the_steps_that_ask_for_them(tmp_path, optimizer):
    trainer, _ = build(
        tmp_path,
        optimizer=optimizer,
        optimizer_metrics_steps=2,
        record_update_metrics=True,
        max_grad_norm_ratio=1.05,
    )
    trainer.train()
    gradient = logged(trainer, "optim/grad/lm_head.weight.norm")
    assert set(gradient) == {2, 4, 6}
    assert set(logged(trainer, "optim/exp_avg/model.norm.weight.max")) == {2, 4, 6}
    assert set(logged(trainer, "optim/param/model.embed_tokens.weight.avg")) == {2, 4, 6}
    update = "optim/step/lm_head.weight.norm" if optimizer == "adamw" else "optim/update_cos_sim"
    assert set(logged(trainer, update)) == {2, 4, 6}
    memory = logged(trainer, "optim/grad_norm_exp_avg/model.layers.0.self_attn.qkv_proj.weight")
    assert set(memory) == {2, 4, 6}
    assert all(value > 0 for value in memory.values())
    # All gradients together have the norm that is logged at every step.
    names = [f"optim/grad/{name}.norm" for name, _ in trainer.model.named_parameters()]
    total = math.sqrt(sum(logged(trainer, name)[4] ** 2 for name in names))
    assert logged(trainer, "optim/total_grad_norm")[4] == pytest.approx(total, rel=1e-6)
