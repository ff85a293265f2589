"""The picture of a data set."""

from pathlib import Path

import numpy as np
from matplotlib.image import imread

from olmo_hf.data.inspection import DatasetStatistics
from olmo_hf.report.data_picture import MAX_SOURCES, _largest, draw_statistics


def statistics(**changes) -> DatasetStatistics:
    found = dict(
        num_instances=100,
        num_inspected=10,
        document_lengths=np.array([1, 5, 900, 2]),
        num_whole_documents=3,
        num_masked=1,
        learned_tokens=9,
        tokens=10,
        instances_by_source={"data/a.npy": 60, "data/b.npy": 40},
    )
    return DatasetStatistics(**{**found, **changes})


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    draw_statistics(statistics(), tmp_path / "a.png")
    draw_statistics(statistics(document_lengths=np.empty(0, np.int32)), tmp_path / "b.png")
    first, second = imread(tmp_path / "a.png"), imread(tmp_path / "b.png")
    assert first.shape == second.shape == (480, 1200, 4)
    # The histogram is there in one and missing in the other.
    assert not np.array_equal(first, second)


def test_many_files_share_a_bar() -> None:
    names, counts = _largest({f"{i}.npy": i for i in range(1, 31)})
    assert len(names) == MAX_SOURCES + 1
    assert names[0] == "30.npy"
    assert names[-1] == "18 more"
    assert sum(counts) == sum(range(1, 31))
