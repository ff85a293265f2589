"""`learning_rate_factors`: who learns at another rate, what is logged and listed, and what a restart makes of it."""

import pytest
import torch

from olmo_hf.errors import ConfigError
from olmo_hf.training.args import SchedulerArgs, TrainingArgs
from olmo_hf.training.optimizers import build_optimizer, describe_optimizer
from tests.training.small import logged, ragged_rows, tiny, trainer_of

FACTORS = {"lm_head.weight": 0.5, "*embed_tokens*": 0.1, "*norm*": 0.0, "*.1.*": 2.0}
"""The norms of layer 1 fit two patterns and belong to the first of them."""


def factor_of(name):
    if name == "lm_head.weight":
        return 0.5
    if "embed_tokens" in name:
        return 0.1
    if "norm" in name:
        return 0.0
    return 2.0 if ".1." in name else 1.0


def by_name(optimizer, key):
    return {name: group[key] for group in optimizer.param_groups for name in group["param_names"]}


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon"])
def test_every_parameter_is_in_one_group_with_its_factor(optimizer):
    model = tiny()
    plain = build_optimizer(model, TrainingArgs(optimizer=optimizer))
    found = build_optimizer(model, TrainingArgs(optimizer=optimizer, learning_rate_factors=FACTORS))
    names = [name for group in found.param_groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert by_name(found, "lr_scale") == {name: factor_of(name) for name in names}
    assert by_name(found, "weight_decay") == by_name(plain, "weight_decay"), "who decays is another matter"


def test_without_factors_the_groups_are_those_of_before():
    groups = build_optimizer(tiny(), TrainingArgs()).param_groups
    assert len(groups) == 2
    assert all("lr_scale" not in group for group in groups)


def test_the_table_at_the_start_lists_them():
    rows = dict(describe_optimizer(tiny(), TrainingArgs(learning_rate_factors=FACTORS)))
    assert "lm_head.weight" in rows["group 1, weight decay 0.1, learning rate x 0.5"]
    assert "model.embed_tokens.weight" in rows["group 4, weight decay 0.0, learning rate x 0.1"]
    assert "group 0, weight decay 0.1" in rows


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ({"*embed_token": 0.1}, r"learning_rate_factors\.\*embed_token: fits no parameter"),
        ({"*": 0.5, "lm_head.weight": 2.0}, r"factors\.lm_head\.weight: every parameter that it fits is decided"),
    ],
)
def test_a_pattern_that_does_nothing_is_refused(factors, words):
    with pytest.raises(ConfigError, match=words):
        build_optimizer(tiny(), TrainingArgs(learning_rate_factors=factors))


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch", "adafactor"])
@pytest.mark.parametrize("scheduler", [SchedulerArgs(warmup=2), None])
def test_rates_are_logged_group_by_group_and_used(tmp_path, optim, scheduler):
    settings = {"optim": optim, "learning_rate": 1e-2, "max_steps": 3, "per_device_train_batch_size": 8}
    trainer = trainer_of(
        tmp_path, tiny(), ragged_rows(24), scheduler=scheduler, learning_rate_factors=FACTORS, **settings
    )
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    scales = [group["lr_scale"] for group in trainer.inner_optimizer.param_groups]
    assert scales == [1.0, 0.5, 0.0, 2.0, 0.1]
    if scheduler is not None:
        full = logged(trainer, "optim/learning_rate_group0")
        for number, scale in enumerate(scales):
            assert logged(trainer, f"optim/learning_rate_group{number}") == {s: r * scale for s, r in full.items()}
        assert full[3] > 0
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]) is (factor_of(name) == 0.0), name


def test_a_factor_is_the_same_as_a_rate_of_its_own(tmp_path):
    """SGD by hand: what moved, over the gradient that moved it, is the rate times the factor."""
    found = {}
    for number, factor in enumerate((1.0, 0.25)):
        model = tiny()
        before = model.lm_head.weight.detach().clone()
        settings = {"optim": "sgd", "learning_rate": 1.0, "weight_decay": 0.0, "max_grad_norm": 0.0}
        trainer_of(
            tmp_path / str(number),
            model,
            ragged_rows(8),
            per_device_train_batch_size=8,
            scheduler=SchedulerArgs(name="constant"),
            learning_rate_factors={"lm_head*": factor},
            **settings,
        ).train()
        found[factor] = model.lm_head.weight.detach() - before
    # Subtracting from weights of size 0.1 rounds by 1e-8.
    torch.testing.assert_close(found[0.25], 0.25 * found[1.0], rtol=0.0, atol=2e-8)


def test_a_restart_may_bring_other_factors(tmp_path):
    """Moments find their parameter by name, whatever the groups are; the new factors count from the next step."""
    settings = {
        "learning_rate": 1e-2,
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "scheduler": SchedulerArgs(name="constant"),
        "save_strategy": "steps",
        "save_steps": 100,
    }
    first = trainer_of(tmp_path, tiny(), ragged_rows(32), stop_step=2, **settings)
    first.train()
    second = trainer_of(tmp_path, tiny(), ragged_rows(32), learning_rate_factors=FACTORS, **settings)
    second.train(resume_from_checkpoint=True)
    norm = "model.norm.weight"
    parameters = [dict(trainer.model.named_parameters())[norm] for trainer in (first, second)]
    assert torch.equal(*parameters), "its factor is 0 from now on"
    assert logged(second, "optim/learning_rate_group1")[3] == 5e-3
    assert second.inner_optimizer.state[parameters[1]]["step"] == 4
