"""Shipped configurations against the published files they come from: every difference is one that is meant."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from olmo_hf.config_file import load_run, run_from_tree
from olmo_hf.model.build import build_config
from olmo_hf.recipes.import_config import import_config
from olmo_hf.recipes.original_file import flatten

CONFIGS = Path(__file__).parent.parent.parent / "configs"
ORIGINALS = Path(os.environ.get("OLMO_HF_ORIGINAL_CONFIGS", "/nowhere"))

# Where our file is, what it comes from, and the settings in which it follows the launch instead of the file.
SOURCES: dict[str, tuple[str, set[str]]] = {
    "olmo2_1b/stage1.yaml": ("OLMo2-1B-stage1.yaml", {"training.max_duration"}),
    "olmo2_7b/stage1.yaml": ("OLMo2-7B-stage1.yaml", set()),
    "olmo2_13b/stage1.yaml": (
        "OLMo2-13B-stage1.yaml",
        {
            "training.learning_rate",
            "training.max_duration",
            "training.save_interval_ephemeral",
            "training.optimizer_metrics_steps",
            "model.activation_checkpointing",
            "data.num_workers",
        },
    ),
    "olmo2_7b/stage2_seed42.yaml": ("OLMo2-7B-stage2-seed42.yaml", set()),
    "olmo2_13b/stage2_seed1110_100b.yaml": (
        "OLMo2-13B-stage2-seed1110-100B.yaml",
        {
            "model.activation_checkpointing",
            "training.per_device_train_batch_size",
            "training.per_device_eval_batch_size",
        },
    ),
    "olmo1/olmo1_1b.yaml": ("OLMo-1B.yaml", set()),
    # The limit of the gradient norm is warmed up as it was, one update late.
    "olmo1/olmo_7b_0724.yaml": ("OLMo-7B-0724.yaml", {"training.scheduler.grad_clip_warmup_lags"}),
    "tiny/20m.yaml": ("OLMo-20M.yaml", set()),
}

# What a file says of its own place: names, directories, trackers.
OF_THE_PLACE = {"name", "training.output_dir", "training.resume", "training.report_to", "training.upload_to"}
SAME_THING = {"model.preset", "data.mix_base", "data.token_dtype", "data.prefetch_factor", "model.attn_implementation"}


def settings_of(run: Any) -> dict[str, Any]:
    flat = flatten(dataclasses.asdict(run))
    return {key: value for key, value in flat.items() if not key.startswith(("model.config", "evaluation.evaluators"))}


@pytest.mark.skipif(not ORIGINALS.is_dir(), reason="OLMO_HF_ORIGINAL_CONFIGS names no folder with configurations")
@pytest.mark.parametrize("name", SOURCES)
def test_only_meant_differences(name, tmp_path):
    source, meant = SOURCES[name]
    ours = load_run(CONFIGS / name)
    theirs = run_from_tree(import_config(ORIGINALS / source, ["--save_folder=x"]).tree)
    left, right = settings_of(ours), settings_of(theirs)
    differing = {key for key in left.keys() | right.keys() if left.get(key) != right.get(key)}
    assert differing - OF_THE_PLACE - SAME_THING == meant
    lengths = {"max_position_embeddings": ours.data.sequence_length}
    architectures = [build_config(run.model).to_init_dict() | lengths for run in (ours, theirs)]
    names = [name for name in architectures[0] if architectures[0][name] != architectures[1][name]]
    assert names == (["eos_token_id"] if name.startswith("tiny/") else [])


@pytest.mark.parametrize("size", ["1b", "7b", "13b"])
def test_ingredients_differ_in_the_seed_alone(size):
    runs = [load_run(path) for path in sorted((CONFIGS / f"olmo2_{size}").glob("stage2_*.yaml"))]
    runs = [run for run in runs if run.data.mix is not None]
    assert len(runs) == 3
    first, *others = (
        {k: v for k, v in settings_of(run).items() if k not in ("name", "training.seed")} for run in runs
    )
    assert all(other == first for other in others)
    assert len({run.training.seed for run in runs}) == 3


def test_the_ladder_shares_everything_but_size():
    runs = [load_run(CONFIGS / "tiny" / f"{size}.yaml") for size in ("20m", "60m", "150m", "300m", "700m")]
    sized = {"name", "model.preset", "training.per_device_train_batch_size", "training.per_device_eval_batch_size"}
    first, *others = ({k: v for k, v in settings_of(run).items() if k not in sized} for run in runs)
    assert all(other == first for other in others)


def evaluators_of(path):
    """How many perplexity sets and how many downstream tasks a configuration evaluates."""
    evaluators = load_run(CONFIGS / path).evaluation.evaluators
    sets = [evaluator for evaluator in evaluators if evaluator.type == "perplexity"]
    tasks = [task for evaluator in evaluators if evaluator.type == "downstream" for task in evaluator.tasks]
    assert len(set(tasks)) == len(tasks)
    return len(sets), len(tasks)


def test_evaluators_are_the_published_ones():
    assert evaluators_of("tiny/20m.yaml") == (11, 24)
    assert evaluators_of("olmo1/olmo1_1b.yaml") == (24, 11)
    assert evaluators_of("olmo1/olmo_7b_0724.yaml") == (11, 23)
    assert evaluators_of("olmo2_7b/stage1.yaml") == (0, 27)
    assert evaluators_of("olmo2_13b/stage2_seed1110_100b.yaml") == (0, 24)
