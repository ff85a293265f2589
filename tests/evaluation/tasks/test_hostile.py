"""Files of tasks that nobody meant to give: whatever they hold, the answer is questions or one of our messages."""

import gzip
import json
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from olmo_hf.errors import ConfigError, OlmoHfError
from olmo_hf.evaluation.tasks.questions import read_questions
from olmo_hf.evaluation.tasks.table import find_tasks

REUSES = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = [
    "documents",
    "requests",
    "context",
    "contexts",
    "choices",
    "answer",
    "like",
    "metric",
    "shots",
    "each",
    "other",
]
ENTRY = JSON | st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5)
TEXT = st.text(max_size=60) | st.text(alphabet="mine: [{&*a]}-|>'\"\n!?", max_size=60)
REQUESTS = "mine:\n  requests: {file}\n"
DOCUMENTS = 'mine:\n  documents: {file}\n  context: "Q: {{{{ q }}}}"\n  choices: options\n  answer: gold\n'
GOOD_REQUEST = {
    "doc_id": 0,
    "idx": 0,
    "label": 0,
    "request_type": "loglikelihood",
    "request": {"context": "Q:", "continuation": " a"},
}
GOOD_DOCUMENT = {"q": "1+1", "options": ["two", "three"], "gold": 0}
WHOLE = gzip.compress(json.dumps(GOOD_REQUEST).encode() * 20)


def answer(folder: Path, task: str, file: str, content: bytes) -> None:
    """Questions, each with something to choose from, or a message that names the file."""
    (folder / file).write_bytes(content)
    (folder / "own.yaml").write_text(task.format(file=file))
    (found,) = find_tasks(["mine"], [str(folder / "own.yaml")])
    questions, said = [], ""
    try:
        questions = list(read_questions(found))
    except OlmoHfError as error:
        said = str(error)
    if said:
        assert file in said or "mine" in said
        assert len(said) < 2_000
    for question in questions:
        assert question.options
        assert 0 <= question.answer < len(question.options)


def lines(*values: object) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


@REUSES
@example(file="a.jsonl.gz", content=b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x00\x06")
@example(file="a.jsonl.gz", content=WHOLE[:-9])
@example(file="a.jsonl.gz", content=WHOLE[:20] + b"\xff" * 8 + WHOLE[28:])
@example(file="a.jsonl", content=b"[" * 100_000)
@example(file="a.json", content=b"[" * 100_000)
@example(file="a.jsonl", content=b"9" * 5_000)
@given(
    file=st.sampled_from(["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet"]),
    content=st.binary(max_size=200)
    | st.lists(JSON, max_size=3).map(lambda values: lines(*values))
    | st.binary(max_size=60).map(lambda rest: b"PAR1" + rest + b"PAR1")
    | st.binary(max_size=60).map(lambda rest: b"\x1f\x8b\x08\x00" + rest),
)
def test_any_bytes(tmp_path: Path, file: str, content: bytes) -> None:
    for task in (REQUESTS, DOCUMENTS):
        answer(tmp_path, task, file, content)


@REUSES
@given(
    changes=st.lists(
        st.dictionaries(st.sampled_from([*GOOD_REQUEST, "doc", "other"]), JSON, max_size=2), min_size=1, max_size=3
    ),
    inner=st.dictionaries(st.sampled_from(["context", "continuation"]), JSON, max_size=2),
)
def test_any_requests(tmp_path: Path, changes: list[dict], inner: dict) -> None:
    request = GOOD_REQUEST | {"request": {"context": "Q:", "continuation": " a", **inner}}
    answer(tmp_path, REQUESTS, "a.jsonl", lines(*[request | change for change in changes]))


@REUSES
@given(changes=st.lists(st.dictionaries(st.sampled_from([*GOOD_DOCUMENT, "other"]), JSON, max_size=2), max_size=3))
def test_any_documents(tmp_path: Path, changes: list[dict]) -> None:
    answer(tmp_path, DOCUMENTS, "a.jsonl", lines(*[GOOD_DOCUMENT | change for change in changes]))


@REUSES
@given(
    table=st.dictionaries(
        st.text(max_size=6),
        JSON
        | st.dictionaries(st.sampled_from(["documents", "requests", "context", "choices", "like", "metric"]), JSON),
        max_size=2,
    ).map(lambda value: json.dumps(value, allow_nan=False) if "NaN" not in repr(value) else "{}")
    | st.text(max_size=60)
    | st.just("[" * 5_000)
)
def test_any_table_of_tasks(tmp_path: Path, table: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_bytes(table.encode("utf-8", "surrogatepass"))
    problems: list[str] = []
    try:
        assert find_tasks(["mine"], [str(path)])[0].label == "mine"
    except ConfigError as error:
        problems = error.problems
    assert all(len(problem) < 1_000 for problem in problems)
