"""Every update rule of Hugging Face's `optim`, with our rule of who decays: also those of other packages."""

from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from olmo_hf.errors import ConfigError
from olmo_hf.training.args import SchedulerArgs
from olmo_hf.training.schedule_free import averaged_weights
from tests.training.small import logged, ragged_rows, tiny, trainer_of


def build(folder, optim, **settings):
    rows = ragged_rows(32)
    return trainer_of(
        folder, tiny(), rows, optim=optim, max_steps=4, per_device_train_batch_size=8, learning_rate=1e-2, **settings
    )


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop"])
def test_it_learns_by_our_rule_of_decay(tmp_path, optim):
    trainer = build(tmp_path, optim, optimizer_metrics_steps=2)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    decay = {n: group["weight_decay"] for group in trainer.inner_optimizer.param_groups for n in group["param_names"]}
    assert set(decay) == set(before)
    assert [name for name, value in decay.items() if value == 0.0] == ["model.embed_tokens.weight"]
    assert set(decay.values()) == {0.1, 0.0}
    assert all(not torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())
    assert len(logged(trainer, "optim/grad/lm_head.weight.norm")) == 2


@pytest.mark.parametrize("rule", ["by_role", "by_dimension"])
def test_the_rule_of_decay_is_the_same_as_for_our_own(tmp_path, rule):
    settings = {"weight_decay_rule": rule, "decay_norm_and_bias": False, "decay_embeddings": True}
    found = []
    for optim in ("adamw_torch_fused", "adamw_torch"):
        optimizer = build(tmp_path, optim, **settings).create_optimizer()
        found.append({n: group["weight_decay"] for group in optimizer.param_groups for n in group["param_names"]})
    assert found[0] == found[1]
    assert len(set(found[0].values())) == 2


def test_a_package_that_is_missing_is_named(tmp_path):
    with pytest.raises(
        ConfigError, match=r"training\.optim: found 'apollo_adamw', which cannot be had here: .*apollo"
    ):
        build(tmp_path, "apollo_adamw", optim_target_modules="all-linear").create_optimizer()


# Not among the packages of a developer: where it is installed, every run imports it at its start.
needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="needs bitsandbytes (`pip install olmo-hf[optim]`)"
)
OF_OTHERS = [
    pytest.param("adamw_bnb_8bit", marks=needs_bitsandbytes),
    pytest.param("lion_8bit", marks=needs_bitsandbytes),
    "adafactor",
    "schedule_free_adamw",
    "schedule_free_radam",
]


def test_eight_bits_without_the_package_are_refused_before_the_first_step(tmp_path):
    if find_spec("bitsandbytes") is not None:
        pytest.skip("bitsandbytes is installed")
    with pytest.raises(ConfigError, match=r"training\.optim: found 'adamw_bnb_8bit', .* install what it asks for"):
        build_long(tmp_path, "adamw_bnb_8bit").train()


def build_long(folder, optim, **settings):
    rows = ragged_rows(48)
    chosen = {"save_strategy": "steps", "save_steps": 3, "scheduler": SchedulerArgs(name="constant"), **settings}
    return trainer_of(
        folder, tiny(), rows, optim=optim, max_steps=6, per_device_train_batch_size=8, learning_rate=1e-2, **chosen
    )


@pytest.mark.parametrize("optim", OF_OTHERS)
def test_stopped_in_the_middle_the_run_goes_on_bitwise(tmp_path, optim):
    through = build_long(tmp_path / "through", optim)
    through.train()
    build_long(tmp_path / "stopped", optim, stop_step=3).train()
    again = build_long(tmp_path / "stopped", optim)
    again.train(resume_from_checkpoint=True)
    one, other = (logged(trainer, "train/CrossEntropyLoss") for trainer in (through, again))
    assert [other[step] for step in (4, 5, 6)] == [one[step] for step in (4, 5, 6)]
    for name, parameter in again.model.named_parameters():
        assert torch.equal(parameter, through.model.get_parameter(name)), name


class Evaluated:
    """An evaluator that looks at the weights it is given."""

    def __init__(self):
        self.seen = []

    def evaluate(self, model, *, device, autocast):
        self.seen.append(model.lm_head.weight.detach().clone())
        return {"eval/seen": float(len(self.seen))}


class EvaluateAtTheEnd(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate = state.global_step == 6


def test_schedule_free_weights_are_averaged_where_they_are_evaluated_and_kept(tmp_path):
    trainer, evaluated = build_long(tmp_path, "schedule_free_adamw"), Evaluated()
    trainer.add_callback(EvaluateAtTheEnd())
    trainer.evaluators = [evaluated]
    trainer.train()
    training = trainer.model.lm_head.weight.detach().clone()
    with averaged_weights(trainer.inner_optimizer):
        averaged = trainer.model.lm_head.weight.detach().clone()
    assert not torch.equal(training, averaged)
    kept = load_file(tmp_path / "checkpoint-6" / "model.safetensors")["lm_head.weight"]
    # Two ways there and back lie between the three: a rounding of float32 each.
    torch.testing.assert_close(kept, averaged, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(evaluated.seen[-1], averaged, rtol=1e-6, atol=1e-7)
    assert (training - averaged).abs().max() > 1e-4


@pytest.mark.parametrize("optim", ["schedule_free_adamw", "schedule_free_sgd"])
def test_an_evaluation_changes_no_bit_of_schedule_free_weights(tmp_path, optim):
    trainer = build_long(tmp_path, optim)
    trainer.evaluators = [Evaluated()]
    trainer.train()
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.evaluate()
    assert not torch.equal(trainer.evaluators[0].seen[-1], before["lm_head.weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())
    with averaged_weights(trainer.inner_optimizer):
        pass
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items()), (
        "there and back without the copy changes bits, or this test could not fail"
    )
