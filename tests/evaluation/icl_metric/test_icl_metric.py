"""The metric as a module of `evaluate`: outside training, without a network, over several processes."""

from pathlib import Path
from typing import Any

import evaluate
import pytest

import olmo_hf.evaluation.icl_metric
from olmo_hf.errors import DataError
from tests.joined import JoinedRanks

PLACE = str(Path(olmo_hf.evaluation.icl_metric.__file__).parent)

# Of three documents the first and the third are answered right.
SUMS = [-1.0, -2.0, -1.0, -2.0, -3.0, -2.0, -1.0]


def references() -> list[dict[str, Any]]:
    rows = []
    for document, (count, answer) in enumerate([(2, 0), (3, 2), (2, 1)]):
        for place in range(count):
            rows.append(
                {
                    "document": document,
                    "continuation": place,
                    "num_continuations": count,
                    "answer": answer,
                    "num_characters": place + 1,
                    "num_bytes": place + 1,
                    "unconditional": -1.0 - place,
                }
            )
    return rows


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def load(tmp_path: Path, metric: str, **options: Any) -> evaluate.Metric:
    return evaluate.load(PLACE, metric, cache_dir=str(tmp_path / "cache"), **options)


def test_scores_of_a_task(tmp_path: Path) -> None:
    found = load(tmp_path, "acc").compute(predictions=SUMS, references=references())
    assert found == {"acc": pytest.approx(2 / 3), "incomplete": 0}
    # Per character: -1, -1 | -1, -1, -1 | -2, -.5.
    assert load(tmp_path, "len_norm").compute(predictions=SUMS, references=references())["len_norm"] == (
        pytest.approx(2 / 3)
    )
    # Differences: 0, 0 | 0, 0, 0 | -1, 1.
    assert load(tmp_path, "pmi_dc").compute(predictions=SUMS, references=references())["pmi_dc"] == pytest.approx(
        2 / 3
    )


def test_what_comes_twice_counts_once_and_half_documents_do_not(tmp_path: Path) -> None:
    metric = load(tmp_path, "acc")
    rows = references()
    metric.add_batch(predictions=SUMS, references=rows)
    metric.add_batch(predictions=[0.0, 0.0], references=[rows[1], rows[5]])
    metric.add(prediction=0.0, reference={**rows[0], "document": 7})
    assert metric.compute() == {"acc": pytest.approx(2 / 3), "incomplete": 1}
    with pytest.raises(DataError, match="nothing to score"):
        load(tmp_path, "acc").compute(predictions=SUMS[:1], references=rows[:1])


def test_an_unknown_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected one of acc"):
        load(tmp_path, "accuracy")


def of_process(place: int, cache: str) -> dict[str, float] | None:
    metric = evaluate.load(PLACE, "acc", num_process=2, process_id=place, experiment_id="two", cache_dir=cache)
    metric.add_batch(predictions=SUMS[place::2], references=references()[place::2])
    return metric.compute()


def test_two_processes_say_what_one_says(two_ranks: JoinedRanks, tmp_path: Path) -> None:
    first, second = two_ranks(of_process, str(tmp_path / "cache"))
    assert first == {"acc": pytest.approx(2 / 3), "incomplete": 0}
    assert second is None, "the first process gathers what the others have written"
