"""Rules between fields, on runs that are built directly; `tests/test_config_file.py` reaches them from YAML."""

import dataclasses

import pytest

from olmo_hf.args import RunArgs
from olmo_hf.callbacks.args import LossSpikeArgs, UploadArgs
from olmo_hf.data.args import DataArgs
from olmo_hf.model.args import ModelArgs
from olmo_hf.settings import checks
from olmo_hf.settings.problems import Problems
from olmo_hf.training.args import SchedulerArgs, TrainingArgs

GOOD = RunArgs(
    name="a",
    model=ModelArgs(preset="olmo2_tiny"),
    data=DataArgs(paths=("a.npy",)),
    training=TrainingArgs(max_duration=1, global_train_batch_size=1),
)


def sentences(run: RunArgs, known: tuple[str, ...] = ()) -> list[str]:
    problems = Problems()
    for key in known:
        problems.add(key, f"{key}: known")
    checks.check_run(run, problems)
    return problems.sentences[len(known) :]


def test_a_good_run_has_no_problem():
    assert sentences(GOOD) == []


def test_a_key_with_a_problem_gets_no_second_one():
    run = dataclasses.replace(GOOD, name="")
    assert len(sentences(run)) == 1
    assert sentences(run, known=("name",)) == []


def test_an_unknown_preset_names_the_nearest():
    (sentence,) = sentences(dataclasses.replace(GOOD, model=ModelArgs(preset="olmo2_tyni")))
    assert sentence.endswith("did you mean 'olmo2_tiny'?")


@pytest.mark.parametrize("key", checks._AT_LEAST)
def test_every_range_names_a_field_and_its_bound_holds(key):
    section, *inner, name = key.split(".")
    for value, is_good in ((checks._AT_LEAST[key], True), (checks._AT_LEAST[key] - 1, False)):
        block = getattr(GOOD, section)
        if inner:
            block = dataclasses.replace(block, scheduler=dataclasses.replace(SchedulerArgs(), **{name: value}))
        else:
            block = dataclasses.replace(block, **{name: value})
        found = list(checks.check_ranges(dataclasses.replace(GOOD, **{section: block})))
        assert [sentence.partition(":")[0] for sentence in found] == ([] if is_good else [key])


def test_flash_attention_needs_half_precision():
    flash = dataclasses.replace(GOOD, model=ModelArgs(preset="olmo2_tiny", attn_implementation="flash_attention_2"))
    (sentence,) = sentences(flash)
    assert sentence.startswith("model.attn_implementation: found 'flash_attention_2'")
    assert "training.bf16" in sentence
    for name in ("bf16", "fp16"):
        half = dataclasses.replace(flash, training=dataclasses.replace(GOOD.training, **{name: True}))
        assert sentences(half) == []


def test_schedule_free_optimizers_have_no_decay_beside_them():
    training = dataclasses.replace(GOOD.training, optim="schedule_free_adamw")
    (sentence,) = sentences(dataclasses.replace(GOOD, training=training))
    assert sentence.startswith(
        "training.scheduler.name: found 'cosine_with_warmup' with `training.optim: schedule_free"
    )
    training = dataclasses.replace(training, scheduler=SchedulerArgs(name="constant_with_warmup"))
    assert sentences(dataclasses.replace(GOOD, training=training)) == []


@pytest.mark.parametrize("key", ["selective_updates", "record_update_metrics"])
@pytest.mark.parametrize(("name", "value"), [("optimizer", "muon"), ("optim", "adafactor")])
def test_what_an_optimizer_does_not_know_is_not_asked_of_it(key, name, value):
    training = dataclasses.replace(GOOD.training, **{key: True})
    assert sentences(dataclasses.replace(GOOD, training=training)) == []
    assert sentences(dataclasses.replace(GOOD, training=dataclasses.replace(training, optimizer="lion"))) == []
    (sentence,) = sentences(dataclasses.replace(GOOD, training=dataclasses.replace(training, **{name: value})))
    assert sentence.startswith(f"training.{key}: given together with `training.{name}: {value}`")


def test_a_learning_rate_is_not_turned_round():
    training = dataclasses.replace(GOOD.training, learning_rate_factors={"lm_head.weight": -1.0, "*": 0.0})
    (sentence,) = sentences(dataclasses.replace(GOOD, training=training))
    assert sentence.startswith("training.learning_rate_factors.lm_head.weight: found -1, expected 0 or more")


@pytest.mark.parametrize(
    ("address", "is_known"), [("s3://bucket/run", True), ("gs://bucket/run", True), ("s9://bucket/run", False)]
)
def test_copies_go_to_a_kind_of_store_that_exists(address, is_known):
    run = dataclasses.replace(
        GOOD,
        training=dataclasses.replace(GOOD.training, upload_to=address),
        callbacks=dataclasses.replace(GOOD.callbacks, upload=UploadArgs(to=address)),
    )
    found = sentences(run)
    assert len(found) == (0 if is_known else 2)
    assert all(f"found '{address}', but nothing knows `s9://`" in sentence for sentence in found)


def test_going_back_before_a_spike_needs_every_step_logged():
    going_back = dataclasses.replace(GOOD.callbacks, loss_spike=LossSpikeArgs(max_rollbacks=1))
    run = dataclasses.replace(GOOD, callbacks=going_back)
    assert sentences(run) == []
    run = dataclasses.replace(run, training=dataclasses.replace(GOOD.training, logging_steps=5))
    (found,) = sentences(run)
    assert "training.logging_steps comes to 5 steps" in found
