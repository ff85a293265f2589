"""Evaluation inside real runs on several ranks: the figures of one rank, sharded or not."""

from pathlib import Path

import pytest
import yaml

from olmo_hf.callbacks.json_lines import METRICS_FILE, read_json_lines
from tests import runs
from tests.callbacks.test_with_trainer import write_evaluated_run
from tests.cli.test_evaluate import letter_tokenizer, write_task
from tests.forks import Forks

SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}


def held_out(run_dir: Path) -> dict[int, float]:
    rows = read_json_lines(run_dir / METRICS_FILE)
    name = "eval/held-out/CrossEntropyLoss"
    return {row["step"]: row[name] for row in rows if name in row}


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, SHARDED], ids=["ddp", "fsdp2"])
def test_two_ranks_say_what_one_says(forks: Forks, tmp_path: Path, environment: dict[str, str]) -> None:
    # Five instances on two ranks in batches of two: one rank has a filler in each batch.
    options = {"max_duration": 4, "per_device_eval_batch_size": 2, "dropout": 0.0}
    forks.run(write_evaluated_run(tmp_path / "one", **options))
    forks.run(write_evaluated_run(tmp_path / "two", **options), ranks=2, **environment)
    one, two = held_out(tmp_path / "one" / "run"), held_out(tmp_path / "two" / "run")
    assert list(one) == list(two) == [0, 2, 4]
    assert two[0] == pytest.approx(one[0], abs=1e-6), "the same weights: only the order of sums differs"
    assert two[4] == pytest.approx(one[4], abs=1e-5)


def write_run_with_tasks(directory: Path, *, evaluates: bool) -> Path:
    """A run with dropout and a worker; with evaluation, tasks and perplexity every 256 tokens and at the start."""
    path = runs.write_run(directory, save_interval_ephemeral=None, max_duration=6)
    tokenizer = letter_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(90)])  # the ids of the run's random tokens
    tokenizer.save_pretrained(directory / "tokenizer")
    settings = yaml.safe_load(path.read_text())
    settings["model"] |= {"tokenizer": str(directory / "tokenizer")}
    settings["model"]["config"] |= {"eos_token_id": 0, "pad_token_id": None}
    settings["data"] |= {"num_workers": 1}
    if evaluates:
        data = {"paths": settings["data"]["paths"], "token_dtype": "uint16", "sequence_length": 16}
        own = {"tasks": ["mine"], "task_files": [str(write_task(directory))], "metrics": ["acc", "bpb"]}
        settings["evaluation"] = {
            "interval": "256T",
            "on_load": True,
            "evaluators": [
                {"type": "downstream", **own, "max_instances": 3},
                {"by_source": True, "data": {**data, "paths": [], "sources": {"a": {"paths": data["paths"]}}}},
            ],
        }
    path.write_text(yaml.safe_dump(settings))
    return path


COMPILED = ("--training.torch_compile=true", "--training.torch_compile_backend=eager")


@pytest.mark.parametrize("words", [(), COMPILED], ids=["plain", "compiled"])
def test_tasks_in_the_loop_change_no_bit_of_training(forks: Forks, tmp_path: Path, words: tuple[str, ...]) -> None:
    forks.run(write_run_with_tasks(tmp_path / "with", evaluates=True), *words)
    forks.run(write_run_with_tasks(tmp_path / "without", evaluates=False), *words)
    rows = list(read_json_lines(tmp_path / "with" / "run" / METRICS_FILE))
    evaluations = [row for row in rows if "eval/downstream/mine_acc" in row]
    assert [row["step"] for row in evaluations] == [0, 2, 4, 6], "256 tokens are two steps"
    assert all(row["eval/a/CrossEntropyLoss"] > 0 and row["eval/downstream_bpb/mine_bpb"] > 0 for row in evaluations)
    assert runs.weights(tmp_path / "with" / "run") == runs.weights(tmp_path / "without" / "run")
