"""The table of tasks: every label of the original, and tasks of one's own."""

from pathlib import Path

import pytest

from olmo_hf.errors import ConfigError
from olmo_hf.evaluation.args import METRICS
from olmo_hf.evaluation.tasks.sources import data_roots
from olmo_hf.evaluation.tasks.table import find_tasks, original_tasks, read_task_file, shipped_tasks
from tests.evaluation.task_data import needs_data


def test_the_originals_table_is_whole() -> None:
    tasks = original_tasks()
    assert len(tasks) == 242
    assert sum(label.startswith("mmlu_") for label in tasks) == 76
    assert sum(bool(task.requests) for task in tasks.values()) == 147
    assert all(task.metric in METRICS for task in tasks.values())


# What the original's table says of some labels, one of each kind.
@pytest.mark.parametrize(
    ("label", "metric"),
    [
        ("arc_easy", "acc"),
        ("arc_challenge", "len_norm"),
        ("mrpc", "f1"),
        ("mmlu_other_var", "len_norm"),
        ("mmlu_stem_test_rc_5shot_bpb", "bpb"),
        ("winogrande_train_rc_5shot", "len_norm"),
        ("winogrande_rc_5shot", "acc"),
        ("copycolors_xl_10way", "acc"),
        ("gsm8k_gold_bpb_5shot", "bpb"),
    ],
)
def test_metrics_are_the_originals(label: str, metric: str) -> None:
    assert original_tasks()[label].metric == metric


@needs_data
def test_the_data_of_every_task_are_in_the_packages() -> None:
    roots = data_roots()
    missing = []
    for label, task in shipped_tasks().items():
        kind, pattern = ("oe_eval_tasks", task.requests) if task.requests else ("hf_datasets", task.documents)
        for member in task.each or ("",):
            name = pattern.replace("{split}", task.split).replace("{each}", member)
            if not any((root / kind / name).is_dir() for root in roots):
                missing.append(f"{label}: {name}")
    assert not missing


def test_unknown_labels_are_refused_together_with_the_nearest_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        find_tasks(["piqa", "arc_esy", "mmlu_stem_mc5shot", "xyzzy"])
    first, second, third = caught.value.problems
    assert "'arc_esy'" in first
    assert "arc_easy" in first
    assert "mmlu_stem_mc_5shot" in second
    assert "--list-tasks" in third


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_task_of_ones_own_may_start_from_another(tmp_path: Path) -> None:
    own = write(
        tmp_path / "own.yaml", "mine: {like: hellaswag, documents: mine.jsonl}\nsecond: {like: mine, metric: acc}\n"
    )
    mine, second = find_tasks(["mine", "second"], [own])
    assert (mine.metric, second.metric) == ("len_norm", "acc")
    assert mine.folder == tmp_path
    assert second.documents == "mine.jsonl"
    assert mine.choices == original_tasks()["hellaswag"].choices


def test_what_replaces_the_other_form_of_a_field_replaces_it(tmp_path: Path) -> None:
    own = write(tmp_path / "own.yaml", 'mine: {like: hellaswag, continuations: ["a", "b"], answer: 0}\n')
    (mine,) = find_tasks(["mine"], [own])
    assert mine.choices == ""
    assert mine.continuations == ("a", "b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no tasks"),
        ("[1, 2]", "no tasks"),
        ("mine: 3", "fields of a task"),
        ("mine: {like: helaswag}", "hellaswag"),
        ("mine: {documents: a.jsonl, contxt: x}", "did you mean context"),
        ("mine: {documents: a.jsonl, context: x, continuations: [yes, no], answer: 0}", "list of texts"),
        ("mine: {documents: a.jsonl}", "context is missing"),
        ("mine: {context: x, continuations: [a], answer: 0}", "one of `documents` and `requests`"),
        ("mine: {like: piqa, metric: accuracy}", "expected one of acc"),
        ("mine: {like: piqa, shots: [-1]}", "numbers of examples"),
        ("mine: {like: piqa, shots: [2]}", "examples"),
        ("mine: {like: piqa, contexts: [a, b]}", "exactly one continuation"),
        ("mine: {like: mmlu_rc, each: physics}", "stem, humanities"),
        ("mine: [unclosed", "cannot be read"),
    ],
)
def test_bad_files_are_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    path = Path(write(tmp_path / "own.yaml", text))
    with pytest.raises(ConfigError) as caught:
        read_task_file(path)
    assert "own.yaml" in str(caught.value)
    assert words in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        find_tasks(["piqa"], [str(tmp_path / "absent.yaml")])
