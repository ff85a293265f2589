"""`olmo-hf evaluate` on small checkpoints and tasks of one's own."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    MambaConfig,
    MptConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from olmo_hf.cli import evaluate as verb
from olmo_hf.cli.main import main
from olmo_hf.errors import CheckpointError
from olmo_hf.recipes import evaluate as recipe
from olmo_hf.recipes.evaluate import find_targets
from olmo_hf.report.evaluations import draw_evaluations
from tests.evaluation.test_perplexity import tiny_model

LETTERS = "abcdefghijklmnopqrstuvwxyz ?:\n"


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """A token per letter, 32 in all."""
    words = {letter: 2 + place for place, letter in enumerate(LETTERS)} | {"<end>": 0, "<unknown>": 1}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", unk_token="<unknown>")


def write_task(folder: Path) -> Path:
    """A task of four questions."""
    lines = [{"q": word, "options": ["yes", "no it is not"], "gold": place % 2} for place, word in enumerate("abcd")]
    (folder / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = folder / "tasks.yaml"
    path.write_text('mine: {documents: mine.jsonl, context: "is {{ q }}?", choices: options, answer: gold}\n')
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two whole checkpoints and a sharded one."""
    folder = tmp_path_factory.mktemp("run")
    write_task(folder)
    for step in (10, 20):
        tiny_model(seed=step).save_pretrained(folder / f"checkpoint-{step}")
        letter_tokenizer().save_pretrained(folder / f"checkpoint-{step}")
    (folder / "checkpoint-30").mkdir()
    return folder


def evaluate(*words: str | Path) -> int:
    return main(["evaluate", *map(str, words)])


def test_one_checkpoint(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = ["--task-file", run / "tasks.yaml", "--tasks", "mine"]
    assert evaluate(run / "checkpoint-10", *task, "--metrics", "acc,bpb", "-o", tmp_path) == 0
    shown = capsys.readouterr().out
    assert "eval/downstream/mine_acc" in shown
    (result,) = json.loads((tmp_path / "evaluation.json").read_text())["results"]
    assert result["step"] == 10
    assert result["questions"] == {"mine": 4}
    assert set(result["metrics"]) == {"eval/downstream/mine_acc", "eval/downstream_bpb/mine_bpb"}
    assert not (tmp_path / "evaluation.png").exists()
    assert evaluate(run, *task, "--limit", 2, "-o", tmp_path) == 0
    (result,) = json.loads((tmp_path / "evaluation.json").read_text())["results"]
    assert (result["step"], result["questions"]) == (20, {"mine": 2}), "the newest whole one"


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=128, hidden_size=16, n_layer=1, n_head=2),
        MambaConfig(vocab_size=128, hidden_size=16, num_hidden_layers=1, state_size=4),
        MptConfig(vocab_size=128, d_model=16, n_layers=1, n_heads=2, max_seq_len=8),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_without_max_position_embeddings(run: Path, tmp_path: Path, config: PreTrainedConfig) -> None:
    assert not hasattr(config, "max_position_embeddings")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    letter_tokenizer().save_pretrained(tmp_path)
    task = ["--task-file", run / "tasks.yaml", "--tasks", "mine", "--metrics", "acc,bpb"]
    assert evaluate(tmp_path, *task, "-o", tmp_path / "out") == 0
    (result,) = json.loads((tmp_path / "out" / "evaluation.json").read_text())["results"]
    assert result["metrics"]["eval/downstream_bpb/mine_bpb"] > 0


def test_all_checkpoints_of_a_run_with_a_plot(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--all", "--task-file", run / "tasks.yaml", "--tasks", "mine", "--metrics", "acc,bpb", "-o", tmp_path]
    assert evaluate(run, *words) == 0
    shown = capsys.readouterr()
    assert [result["step"] for result in json.loads((tmp_path / "evaluation.json").read_text())["results"]] == [10, 20]
    assert "checkpoint-10 checkpoint-20" in shown.out
    assert "checkpoint-30 is sharded" in shown.err
    assert (tmp_path / "evaluation.png").read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_that_its_run_removes_meanwhile_is_passed_over(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "going")
    real = recipe.find_targets

    def find_targets_then_rotate(*given: Any, **named: Any) -> Any:
        found = real(*given, **named)
        shutil.rmtree(found[0][0].source)
        return found

    monkeypatch.setattr(recipe, "find_targets", find_targets_then_rotate)
    words = ["--all", "--task-file", run / "tasks.yaml", "--tasks", "mine", "--metrics", "acc", "-o", tmp_path / "out"]
    assert evaluate(tmp_path / "going", *words) == 0
    results = json.loads((tmp_path / "out" / "evaluation.json").read_text())["results"]
    assert [result["step"] for result in results] == [20]
    assert capsys.readouterr().out.splitlines()[0].split() == ["checkpoint-20"], "a column for what is left"


def test_the_evaluators_of_a_run_are_used_too(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    block = f"{{type: downstream, tasks: [mine], task_files: [{run / 'tasks.yaml'}], metrics: [ce_loss]}}"
    config.write_text(
        f"name: x\nmodel: {{preset: olmo2_tiny}}\ndata: {{paths: [x.npy]}}\n"
        f"training: {{max_duration: 1, global_train_batch_size: 1}}\nevaluation: {{evaluators: [{block}]}}\n"
    )
    assert evaluate(run / "checkpoint-10", "--config", config) == 0
    assert "eval/downstream_ce_loss/mine_ce_loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no model is named"),
        (["RUN"], "nothing is to be measured"),
        (["RUN", "--tasks", "piqqa"], "did you mean piqa"),
        (["RUN/checkpoint-30", "--tasks", "piqa"], "holds no model"),
        (["/no/such/place", "--tasks", "piqa"], "no such directory"),
        (["RUN", "--tasks", "piqa", "--metrics", "accuracy"], "expected some of acc"),
        (["RUN", "--tasks", "mine", "--task-file", "RUN/tasks.yaml", "--limit", "0"], "at least 1"),
        (["RUN", "--tasks", "mine", "--task-file", "RUN/absent.yaml"], "absent.yaml"),
        (
            ["RUN", "--tasks", "mine", "--task-file", "RUN/tasks.yaml", "--device", "toaster"],
            "--device: found 'toaster'",
        ),
        (["RUN", "--tasks", "mine", "--task-file", "RUN/tasks.yaml", "--batch-size", "0"], "--batch-size: found 0"),
    ],
)
def test_bad_words_are_refused(run: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(*(word.replace("RUN", str(run)) for word in words)) == 2
    assert says in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the device is there")
def test_a_device_that_is_not_there_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tasks", "mine", "--task-file", run / "tasks.yaml", "--device", "cuda"]
    assert evaluate(run / "checkpoint-10", *words) == 2
    assert "--device: found 'cuda', which cannot be used here" in capsys.readouterr().err


def test_a_model_that_lacks_weights_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(find_targets([str(run)], all_checkpoints=False)[0][0].source, broken)
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert evaluate(broken, "--tasks", "mine", "--task-file", write_task(tmp_path)) == 2
    assert "lacks 1 weights of its own architecture (model.layers.0.mlp.up_proj.weight)" in capsys.readouterr().err


def test_a_tokenizer_that_does_not_fit_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    large = letter_tokenizer()
    large.add_tokens([f"<{number}>" for number in range(200)])
    large.save_pretrained(tmp_path)
    words = ["--task-file", run / "tasks.yaml", "--tasks", "mine", "--tokenizer", tmp_path]
    assert evaluate(run / "checkpoint-10", *words) == 2
    assert "232 ids, but the model has rows for 128" in capsys.readouterr().err


def test_tasks_are_listed_and_written_for_the_harness(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("--list-tasks", "--task-file", run / "tasks.yaml") == 0
    listed = capsys.readouterr().out
    assert "mmlu_stem_mc_5shot_test" in listed
    assert "mine.jsonl" in listed
    assert evaluate("--write-lm-eval", tmp_path, "--task-file", run / "tasks.yaml", "--tasks", "mine") == 0
    assert (tmp_path / "mine.yaml").is_file()
    assert len((tmp_path / "mine.jsonl").read_text().splitlines()) == 4
    assert verb.HELP


def test_targets(run: Path, tmp_path: Path) -> None:
    targets, notes = find_targets([str(run)], all_checkpoints=True)
    assert [target.step for target in targets] == [10, 20]
    assert len(notes) == 1
    with pytest.raises(CheckpointError, match="holds no model"):
        find_targets([str(tmp_path)], all_checkpoints=False)
    (hub,), _ = find_targets(["someone/model"], all_checkpoints=False)
    assert (hub.source, hub.step) == ("someone/model", None), "no directory: a model of the hub"


def test_a_picture_of_models_without_steps(tmp_path: Path) -> None:
    columns = [("eval/downstream/a_acc", [0.5, None]), ("eval/wiki/CrossEntropyLoss", [3.0, 2.0])]
    draw_evaluations(columns, ["one", "two"], tmp_path / "evaluation.png")
    assert (tmp_path / "evaluation.png").stat().st_size > 10_000
