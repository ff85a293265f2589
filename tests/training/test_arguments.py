"""From the YAML's section to the trainer's arguments."""

import dataclasses
import json

import pytest

from olmo_hf.errors import ConfigError
from olmo_hf.training.args import SchedulerArgs, TrainingArgs
from olmo_hf.training.arguments import OlmoTrainingArguments, build_training_arguments
from olmo_hf.training.batch_plan import plan_batches

BASE = TrainingArgs(max_duration="2560T", global_train_batch_size=8, per_device_train_batch_size=2)


def build(folder, training):
    plan = plan_batches(training, world_size=1, sequence_length=16, num_instances=80)
    return build_training_arguments(training, plan, run_dir=folder, data_loading={})


def test_lengths_come_from_the_plan(tmp_path):
    args = build(tmp_path, dataclasses.replace(BASE, logging_steps="300T", stop_at=7))
    assert (args.max_steps, args.max_tokens, args.stop_step) == (20, 2560, 7)
    assert args.gradient_accumulation_steps == 4
    assert args.logging_steps == 3, "300 tokens are reached by three steps of 128"


def test_every_field_of_the_section_with_the_same_name_arrives(tmp_path):
    changes = {"z_loss_weight": 0.5, "nan_policy": "skip", "optimizer": "lion", "scheduler": SchedulerArgs(warmup=3)}
    args = build(tmp_path, dataclasses.replace(BASE, **changes))
    assert {name: getattr(args, name) for name in changes} == changes


def test_trackers_can_write_them_down(tmp_path):
    """TensorBoard and others write all arguments as JSON when they begin."""
    told = json.loads(build(tmp_path, dataclasses.replace(BASE, save_interval="256T")).to_json_string())
    assert told["scheduler"]["warmup"] == BASE.scheduler.warmup
    assert told["save_intervals"]["permanent"] == {"steps": 2, "minutes": None}


def test_defaults_are_those_of_the_section(tmp_path):
    ours = OlmoTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    differ = {"output_dir", "optim", "scheduler", "save_at_start", "logging_steps", "report_to"}
    for field in dataclasses.fields(TrainingArgs):
        if field.name not in differ and hasattr(ours, field.name):
            assert getattr(ours, field.name) == getattr(TrainingArgs(), field.name), field.name


@pytest.mark.parametrize(
    ("name", "nearby"), [("torch_compile_backend", "inductor"), ("ddp_backend", "gloo")], ids=["compile", "ddp"]
)
def test_a_backend_that_does_not_exist_is_refused_with_those_that_do(tmp_path, name, nearby):
    with pytest.raises(ConfigError, match=rf"training\.{name}: found 'nope', expected one of .*{nearby}"):
        build(tmp_path, dataclasses.replace(BASE, transformers={name: "nope"}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optim": "adamwx"}, "adamwx"),
        ({"transformers": {"hub_strategy": "sometimes"}}, "sometimes"),
    ],
)
def test_what_hugging_face_refuses_is_told_as_a_setting(tmp_path, changes, words):
    with pytest.raises(ConfigError, match="training: ") as caught:
        build(tmp_path, dataclasses.replace(BASE, **changes))
    assert words in str(caught.value)
