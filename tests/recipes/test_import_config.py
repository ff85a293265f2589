"""Importing the original's configurations: every key has a verdict, and what is written runs."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from olmo_hf.args import RunArgs
from olmo_hf.config_file import load_run, run_from_tree
from olmo_hf.errors import ConfigError
from olmo_hf.model.build import build_config
from olmo_hf.model.conversion.architecture import config_from_original
from olmo_hf.recipes.any_file import load_any_run, split_by_style
from olmo_hf.recipes.import_config import Imported, import_config, report_json, report_lines, to_yaml
from olmo_hf.recipes.ledger import STATUSES
from olmo_hf.recipes.original_defaults import flat_defaults
from olmo_hf.recipes.original_file import flatten
from tests.recipes.original import BASE, write

ORIGINALS = sorted(Path(os.environ.get("OLMO_HF_ORIGINAL_CONFIGS", "/nowhere")).glob("*.yaml"))
GOLDEN = Path(__file__).parent.parent / "golden" / "11_checkpoints" / "step30-unsharded" / "config.yaml"


@pytest.fixture
def imported(tmp_path):
    def run(changes: dict[str, Any] | None = None, *words: str, executed: bool = False) -> Imported:
        return import_config(write(tmp_path, changes), words, executed=executed)

    return run


def keys_of(path: Path) -> set[str]:
    return set(flatten(yaml.safe_load(path.read_text())))


def run_of(imported: Imported) -> RunArgs:
    return run_from_tree(imported.tree)


def setting(imported: Imported, ours: str) -> Any:
    return flatten(dataclasses.asdict(run_of(imported)))[ours]


def status(imported: Imported, key: str) -> str:
    return imported.ledger.verdicts[key].status


def test_every_key_has_one_verdict_and_the_result_loads(imported, tmp_path):
    found = imported()
    assert set(found.ledger.verdicts) == keys_of(tmp_path / "original.yaml")
    assert sum(found.ledger.counts().values()) == len(found.ledger.verdicts)
    assert found.ledger.refused() == []
    assert found.open_problems == ()
    target = tmp_path / "ours.yaml"
    target.write_text(to_yaml(found, target))
    assert load_run(target) == run_of(found)


def test_the_main_settings(imported):
    run = run_of(imported())
    assert (run.name, run.training.seed, run.training.output_dir) == ("small", 17, "out/small")
    assert run.data.paths == ("a.npy", "b.npy")
    assert (run.data.token_dtype, run.data.sequence_length) == ("uint16", 32)
    training = run.training
    assert (training.optimizer, training.learning_rate, training.adam_epsilon) == ("adamw", 1e-3, 1e-8)
    assert (training.adam_beta1, training.adam_beta2) == (0.9, 0.95)
    assert training.per_device_eval_batch_size == 2
    assert training.bf16
    assert training.loss_denominator == "batch_tokens"
    assert run.model.attn_implementation == "auto"


def test_defaults_of_the_original_that_are_not_ours_are_written_out(imported):
    found = imported({"optimizer": {"name": "adamw"}, "data": {"paths": ["a.npy"]}})
    training = run_of(found).training
    assert (training.learning_rate, training.weight_decay, training.adam_epsilon) == (1e-4, 0.01, 1e-5)
    assert not training.decay_norm_and_bias
    assert run_of(found).data.token_dtype == "uint16"
    assert "training.weight_decay" in found.ledger.filled


def test_the_architecture_is_that_of_the_conversion(imported):
    config = build_config(run_of(imported()).model)
    assert config.to_init_dict() == config_from_original(BASE["model"])[0].to_init_dict()


def test_a_file_the_original_wrote_itself_goes_over(tmp_path):
    found = import_config(GOLDEN)
    assert set(found.ledger.verdicts) == keys_of(GOLDEN)
    assert found.ledger.refused() == []
    run = run_of(found)
    assert run.training.z_loss_weight == 1e-5
    assert run.training.stop_at == 60
    assert run.training.save_interval is None


@pytest.mark.parametrize("key", ["optimizer.momentum", "model.experts", "data.shards", "optimiser"])
def test_unknown_keys_are_refused_by_name(imported, key):
    found = imported({key: 3})
    assert [verdict.key for verdict in found.ledger.refused()] == [key]
    assert "no such key" in found.ledger.verdicts[key].note


LEGACY = [
    ({"activation_checkpointing": True}, "model.activation_checkpointing", "whole_layer"),
    ({"activation_checkpointing": False}, "model.activation_checkpointing", None),
    ({"activation_checkpointing": "one_in_four"}, "model.activation_checkpointing", "one_in_four"),
    ({"optimizer.name": "decoupled_lionw"}, "training.optimizer", "lion"),
    ({"optimizer.no_decay_norm_and_bias": False}, "training.decay_embeddings", True),
    ({"precision": "fp32"}, "training.bf16", False),
    ({"precision": "amp_fp16"}, "training.fp16", True),
    ({"max_grad_norm": None}, "training.max_grad_norm", 0.0),
    ({"max_grad_norm_ratio": 2.0}, "training.max_grad_norm", 0.0),
    ({"gen1_gc_interval": None}, "callbacks.garbage_collector", None),
    ({"save_data_indices": False}, "callbacks.data_indices", None),
    ({"data.generate_doc_lengths": True}, "data.document_masking", True),
    ({"remote_save_folder": "s3://b/run"}, "training.upload_to", "s3://b/run"),
    ({"compile": {"mode": "max-autotune"}}, "training.torch_compile_mode", "max-autotune"),
    ({"save_num_checkpoints_to_keep": 0}, "training.save_interval", None),
    ({"save_num_checkpoints_to_keep": 9}, "training.keep_sharded", 9),
    ({"distributed_strategy": "ddp", "save_interval": 50}, "training.save_interval_unsharded", 50),
    ({"time_limit": 60}, "callbacks.cancellation.time_limit_seconds", 60),
]


@pytest.mark.parametrize(("changes", "ours", "value"), LEGACY, ids=[str(list(c)) + str(v) for c, _, v in LEGACY])
def test_spellings_and_switches(imported, changes, ours, value):
    found = imported(changes)
    assert found.ledger.settings[ours] == value
    assert found.open_problems == ()


def test_data_sets_are_read_in_alphabetical_order(imported):
    found = imported({"data": {"datasets": {"web": ["w.npy"], "books": ["b1.npy", "b0.npy"]}}})
    assert run_of(found).data.paths == ("b1.npy", "b0.npy", "w.npy")
    assert status(found, "data.datasets.web") == "translated"


def test_foreign_data_sets_are_refused(imported):
    found = imported({"data": {"custom_dataset": {"name": "mine.Data"}}})
    assert status(found, "data.custom_dataset.name") == "refused"
    assert any("data.paths" in problem for problem in found.open_problems)


def test_evaluators(imported):
    sets = {"wiki": ["w.npy"], "books": ["b.npy"]}
    evaluators = [
        {"label": "all", "data": {"datasets": sets, "memmap_dtype": "uint32", "drop_last": True}},
        {"label": "piqa", "type": "downstream"},
        {"label": "arc_easy", "type": "downstream", "data": {"num_workers": 2, "drop_last": False}},
        {"label": "boolq", "type": "downstream", "subset_num_batches": 10, "device_eval_batch_size": 8},
    ]
    found = imported({"evaluators": evaluators, "eval_interval": 25, "eval_subset_num_batches": 3})
    evaluation = run_of(found).evaluation
    assert [one.label for one in evaluation.evaluators] == ["books", "wiki", "", ""]
    assert evaluation.interval == 25
    first = evaluation.evaluators[0]
    assert (first.data.token_dtype, first.mean_over, first.max_instances) == ("uint32", "instances", 6)
    tasks = [(one.type, one.tasks, one.max_instances) for one in evaluation.evaluators[2:]]
    # Three batches of two continuations, or ten of eight, as questions of four.
    assert tasks == [("downstream", ("piqa", "arc_easy"), 1), ("downstream", ("boolq",), 20)]
    assert status(found, "evaluators[1].label") == "translated"
    assert status(found, "evaluators[2].data.num_workers") == "without effect"


def test_tasks_that_do_not_exist_are_refused_with_the_nearest(imported):
    found = imported({"evaluators": [{"label": "arc_esy", "type": "downstream"}]})
    assert status(found, "evaluators[0].label") == "refused"
    assert "arc_easy" in found.ledger.verdicts["evaluators[0].label"].note


def test_a_second_stage_counts_from_zero_and_keeps_the_optimizer(imported):
    found = imported({"load_path": "/runs/first/step8", "restore_dataloader": False, "no_pre_train_checkpoint": True})
    training = run_of(found).training
    assert (training.resume, training.reset_trainer_state, training.reset_optimizer) == (
        "/runs/first/step8",
        True,
        False,
    )
    assert not training.save_at_start


def test_a_reset_optimizer_is_warmed_up_again(imported):
    found = imported({"load_path": "/runs/first/step8", "reset_optimizer_state": True})
    assert run_of(found).training.bolt_on_warmup == 8


DIFFERENCES = [
    ({"softmax_auxiliary_loss": True, "auxiliary_loss_multiplier": 1e-5}, "training.z_loss_weight", 1e-5, 1e-4),
    ({"fused_loss": True}, "training.z_loss_weight", 0.0, 1e-4),
    ({}, "training.max_duration", 60, 70),
    ({"max_duration": "15360T"}, "training.max_duration", "15360T", 70),
    ({"stop_at": 65}, "training.max_duration", 60, 65),
    ({}, "training.optimizer_metrics_steps", 10, None),
]


@pytest.mark.parametrize(("changes", "ours", "written", "executed"), DIFFERENCES)
def test_written_or_executed(imported, changes, ours, written, executed):
    found = imported(changes)
    assert setting(found, ours) == written
    assert found.ledger.differences
    assert setting(imported(changes, executed=True), ours) == executed


def test_extra_steps_leave_the_curve_where_it_was(imported):
    assert run_of(imported(executed=True)).training.scheduler.t_max == 60
    in_tokens = imported({"scheduler.units": "tokens", "max_duration": "15360T"}, executed=True)
    assert run_of(in_tokens).training.scheduler.t_max == 15360


def test_an_early_stop_is_no_difference(imported):
    found = imported({"stop_at": 40})
    assert run_of(found).training.stop_at == 40
    assert not [d for d in found.ledger.differences if d.key in ("stop_at", "max_duration")]


def test_the_late_warm_up_of_the_limit_is_told(imported):
    changes = {"scheduler.grad_clip_warmup_steps": 5, "scheduler.grad_clip_warmup_factor": 10.0}
    for executed in (False, True):
        found = imported(changes, executed=executed)
        scheduler = run_of(found).training.scheduler
        assert scheduler.grad_clip_warmup_factor == 10.0
        assert scheduler.grad_clip_warmup_lags is executed
        (told,) = [one for one in found.ledger.differences if one.key == "scheduler.grad_clip_warmup_steps"]
        assert told.taken == (told.executed if executed else told.written)


def test_overrides_in_the_style_of_the_original(imported):
    found = imported(None, "--optimizer.learning-rate=9e-4", "--save_overwrite", "--wandb.project=x", "--seed=3")
    run = run_of(found)
    assert (run.training.learning_rate, run.training.seed, run.training.report_to) == (9e-4, 3, ("wandb",))
    assert found.ledger.verdicts["save_overwrite"].value is True


def test_environment_and_paths(imported, monkeypatch, tmp_path):
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    (tmp_path / "step8").mkdir()
    (tmp_path / "step20").mkdir()
    (tmp_path / "step20-unsharded").mkdir()
    changes = {
        "save_folder": "${path.choose:/no/such,${oc.env:SCRATCH}}/${oc.env:NO_SUCH_JOB,${run_name}}",
        "load_path": "${path.last_checkpoint:${oc.env:SCRATCH}}",
    }
    run = run_of(imported(changes))
    assert run.training.output_dir == f"{tmp_path}/small"
    assert run.training.resume == f"{tmp_path}/step20"


def test_globs(imported, tmp_path):
    for name in ("2.npy", "1.npy"):
        (tmp_path / name).touch()
    run = run_of(imported({"data.paths": f"${{path.glob:{tmp_path}/*.npy}}"}))
    assert run.data.paths == (f"{tmp_path}/1.npy", f"{tmp_path}/2.npy")


UNRESOLVED = {
    "${oc.env:NO_SUCH_VARIABLE_HERE}": "NO_SUCH_VARIABLE_HERE is not set",
    "${oc.env:WANDB_API_KEY,none}": "WANDB_API_KEY looks like a secret",
    "${oc.create:x}": "no resolver",
    "${path.choose:/no/such,/nor/this}": "none of",
    "${nothing.here}": "names no key",
    "${save_folder}": "leads back",
    "${path.last_checkpoint:s3://b/run}": "not on this machine",
    "${path.glob:/no/such/*.npy}": "matches no file",
}


@pytest.mark.parametrize(("text", "reason"), UNRESOLVED.items())
def test_what_cannot_be_replaced_is_refused_with_its_reason(imported, text, reason):
    found = imported({"save_folder": text})
    assert [verdict.key for verdict in found.ledger.refused()] == ["save_folder"]
    assert reason in found.ledger.verdicts["save_folder"].note
    assert "--save_folder=" in found.ledger.verdicts["save_folder"].note


ODD = [pytest.param(odd, marks=pytest.mark.slow) for odd in (None, 3, [], ["x"], True, [{"label": None}])]


@pytest.mark.parametrize("odd", ["100ba", *ODD], ids=repr)
def test_odd_values_are_refused_and_break_nothing(tmp_path, odd):
    interpolated = {"device_eval_batch_size", "device_train_microbatch_size", "run_name"}  # named by other keys
    for key in sorted((set(flatten(BASE)) | set(flat_defaults())) - interpolated):
        path = write(tmp_path, {key: odd})
        found = import_config(path)
        assert set(found.ledger.verdicts) == keys_of(path), key


def test_a_configuration_of_another_time_is_read_as_far_as_it_goes(imported):
    found = imported(
        {
            "scheduler.t_warmup": "100ba",
            "algorithms": {"gradient_clipping": {"clipping_threshold": 1.0}},
            "load_weights_only": False,
            "save_interval": "1000ba",
        }
    )
    refused = {verdict.key for verdict in found.ledger.refused()}
    assert refused == {
        "scheduler.t_warmup",
        "algorithms.gradient_clipping.clipping_threshold",
        "load_weights_only",
        "save_interval",
    }
    assert found.open_problems == ()


def test_the_report_for_programs_holds_every_key(imported):
    found = imported({"optimizer.momentum": 1})
    report = json.loads(report_json(found))
    assert {entry["key"] for entry in report["keys"]} == set(found.ledger.verdicts)
    assert report["counts"]["refused"] == 1
    assert set(report["counts"]) == set(STATUSES)
    assert any("optimizer.momentum" in line for line in report_lines(found, every_key=False))


def test_a_file_of_the_original_is_a_run(tmp_path, capsys):
    run = load_any_run(write(tmp_path), ["--optimizer.learning_rate=5e-4", "--training.z_loss_weight=1e-6"])
    assert (run.training.learning_rate, run.training.z_loss_weight) == (5e-4, 1e-6)
    assert "original OLMo trainer" in capsys.readouterr().err


def test_a_run_with_refused_keys_does_not_start(tmp_path):
    with pytest.raises(ConfigError, match=r"optimizer\.momentum"):
        load_any_run(write(tmp_path, {"optimizer.momentum": 1}))


def test_styles_of_overrides():
    words = [
        "--model.d_model=8",
        "--model.tokenizer=x",
        "--data.mix=y",
        "--data.paths=[a]",
        "--training.bf16",
        "--seed=1",
    ]
    theirs, ours = split_by_style(words)
    assert theirs == ["--model.d_model=8", "--data.paths=[a]", "--seed=1"]
    assert ours == ["--model.tokenizer=x", "--data.mix=y", "--training.bf16"]


@pytest.mark.skipif(not ORIGINALS, reason="OLMO_HF_ORIGINAL_CONFIGS names no folder with configurations")
def test_published_configurations():
    for path in ORIGINALS:
        keys = keys_of_resolved(path)
        for executed in (False, True):
            found = import_config(path, executed=executed)
            assert set(found.ledger.verdicts) == keys, path
            unresolved = {"save_folder", "data.custom_dataset"}
            for verdict in found.ledger.refused():
                assert any(verdict.key.startswith(name) for name in unresolved), (path, verdict)
            assert all("data.paths" in problem for problem in found.open_problems), (path, found.open_problems)


def keys_of_resolved(path: Path) -> set[str]:
    from omegaconf import OmegaConf

    return set(flatten(OmegaConf.to_container(OmegaConf.load(path), resolve=False)))


def test_numbers_in_quotes_are_read_where_the_original_reads_them(imported):
    changes = {"optimizer.learning_rate": "3e-4", "stop_at": "40", "model.d_model": "128", "run_name": "17"}
    found = imported(changes | {"model.weight_tying": "yes", "softmax_auxiliary_loss": 1})
    assert not found.ledger.refused()
    run = run_of(found)
    assert (run.training.learning_rate, run.training.stop_at, run.name) == (3e-4, 40, "17")
    assert run.model.config["hidden_size"] == 128
    assert run.model.config["tie_word_embeddings"] is True
    assert run.training.z_loss_weight > 0


@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        ({"scheduler.t_max": "5000"}, "scheduler.t_max", "takes no such value"),
        ({"stop_at": "soon"}, "stop_at", "takes no such value"),
        ({"model.d_model": "sixty"}, "model.d_model", "takes no such value"),
        ({"model.n_layers": True}, "model.n_layers", "takes no such value"),
        ({"model.rope": "perhaps"}, "model.rope", "takes no such value"),
        ({"model.d_model": "${nowhere}"}, "model.d_model", "names no key"),
        ({"scheduler.name": "wsd"}, "scheduler.name", "expected one of cosine_with_warmup"),
        ({"scheduler.units": "epochs"}, "scheduler.units", "expected one of steps, tokens"),
        ({"optimizer": []}, "optimizer", "a section with keys of its own"),
        ({"model": None}, "model", "a section with keys of its own"),
        ({"max_duration": "1.5ep"}, "max_duration", "must be whole"),
        ({"save_overwrite": "${oc.create:x}"}, "save_overwrite", "is no resolver of the original"),
    ],
)
def test_what_the_original_would_not_take_is_refused(imported, changes, key, said):
    found = imported(changes)
    assert said in found.ledger.verdicts[key].note
    assert found.ledger.verdicts[key].status == "refused"
    assert "1 problem" not in found.ledger.verdicts[key].note


def test_no_model_is_made_up_where_a_part_of_it_is_refused(imported):
    found = imported({"model.d_model": "sixty"})
    assert "model" not in found.tree or not found.tree["model"].get("config")
    assert "while model.d_model is refused" in found.ledger.verdicts["model.n_heads"].note


def test_resolvers_of_the_library_and_places_in_lists(imported, monkeypatch):
    monkeypatch.setenv("STEPS", "40")
    changes = {
        "stop_at": "${oc.decode:${oc.env:STEPS}}",
        "seed": "${oc.select:nothing.here,23}",
        "optimizer.weight_decay": "${optimizer.betas[0]}",
        "optimizer.betas": [0.5, 0.75],
        "data.prefetch_factor": "${oc.select:data.num_workers}",
    }
    found = imported(changes)
    run = run_of(found)
    assert (run.training.stop_at, run.training.seed, run.training.weight_decay) == (40, 23, 0.5)
    assert run.data.prefetch_factor == 2


def test_empty_blocks_are_on_and_empty_sections_are_defaults(imported):
    changes = {name: {} for name in ("compile", "wandb", "scheduler", "data.instance_filter", "speed_monitor")}
    found = imported(changes)
    assert not found.ledger.refused()
    run = run_of(found)
    assert run.training.transformers["torch_compile"] is True
    assert run.training.report_to == ("wandb",)
    assert run.data.instance_filter.repetition_max_period == 13
    assert run.training.scheduler.warmup == 100
    assert {name: status(found, name) for name in ("compile", "scheduler")} == {
        "compile": "translated",
        "scheduler": "without effect",
    }
    assert run_of(imported({"compile": None, "wandb": None})).training.report_to != ("wandb",)


def test_training_straight_from_the_file_chooses_too(tmp_path, capsys):
    path = write(tmp_path, {"softmax_auxiliary_loss": True, "auxiliary_loss_multiplier": 1e-5})
    assert load_any_run(path).training.z_loss_weight == 1e-5
    assert "read as written" in capsys.readouterr().err
    for words in (["--as=executed"], ["--as", "executed", "--training.seed=3"]):
        assert load_any_run(path, words).training.z_loss_weight == 1e-4
        assert "read as executed" in capsys.readouterr().err
    for words in (["--as"], ["--as=guessed"]):
        with pytest.raises(ConfigError, match="expected written or executed"):
            load_any_run(path, words)
