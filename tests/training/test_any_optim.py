"""Every update rule of Hugging Face's `optim`, with our rule of who decays."""

import pytest
import torch

from olmo_hf.errors import ConfigError
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
