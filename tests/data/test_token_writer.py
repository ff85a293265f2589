"""Token files as they are written."""

from pathlib import Path

import numpy as np
import pytest

from olmo_hf.data.manifest import file_sha256
from olmo_hf.data.token_writer import SplitWriter, as_dtype
from olmo_hf.errors import DataError


def writer(folder: Path, limit: int = 10, **options) -> SplitWriter:
    return SplitWriter(folder, dtype="uint16", max_tokens_per_file=limit, **options)


def contents(folder: Path) -> list[list[int]]:
    return [np.fromfile(path, np.uint16).tolist() for path in sorted(folder.glob("*.npy"))]


def test_an_id_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"id 100,277 does not fit uint16"):
        writer(tmp_path).add(np.array([5, 65_543, 100_277]))
    assert as_dtype(np.array([65_535]), "uint16").tolist() == [65_535]


def test_documents_are_never_cut_and_nothing_is_lost(tmp_path: Path) -> None:
    out = writer(tmp_path)
    documents = [np.arange(n) for n in (4, 6, 1, 25, 9, 2)]
    for document in documents:
        out.add(document)
    files = out.close()
    # 4 + 6 fill a file exactly; the long one has a file of its own; no file is empty.
    assert [file.num_tokens for file in files] == [10, 1, 25, 9, 2]
    assert [file.num_documents for file in files] == [2, 1, 1, 1, 1]
    assert np.concatenate(contents(tmp_path)).tolist() == np.concatenate(documents).tolist()
    assert [file.sha256 for file in files] == [file_sha256(tmp_path / file.path) for file in files]
    assert [file.size_bytes for file in files] == [2 * file.num_tokens for file in files]


@pytest.mark.parametrize("saved_after", range(8))
@pytest.mark.parametrize("with_label_mask", [False, True])
def test_continuing_after_a_kill_gives_the_same_files(tmp_path: Path, saved_after: int, with_label_mask: bool) -> None:
    rng = np.random.default_rng(saved_after)
    documents = [rng.integers(0, 60_000, n) for n in (4, 3, 2, 8, 25, 9, 2)]
    masks = [rng.integers(0, 2, d.size) for d in documents]

    def add(out: SplitWriter, first: int, last: int) -> None:
        for document, mask in zip(documents[first:last], masks[first:last], strict=True):
            out.add(document, mask if with_label_mask else None)

    whole = writer(tmp_path / "whole", with_label_mask=with_label_mask)
    add(whole, 0, 7)
    expected = whole.close()

    killed = writer(tmp_path / "killed", with_label_mask=with_label_mask)
    add(killed, 0, saved_after)
    state = killed.state()
    add(killed, saved_after, 7)
    killed.close()  # everything behind the state is on disk, under final names, and is not trusted

    again = writer(tmp_path / "killed", with_label_mask=with_label_mask, state=state)
    assert again.num_documents == saved_after
    add(again, saved_after, 7)
    assert again.close() == expected
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert not list((tmp_path / "killed").rglob(".*"))
    if with_label_mask:
        flags = [np.fromfile(p, np.bool_) for p in sorted((tmp_path / "killed" / "label_mask").glob("*.npy"))]
        assert np.concatenate(flags).astype(int).tolist() == np.concatenate(masks).tolist()


def test_files_have_hidden_names_until_they_are_whole(tmp_path: Path) -> None:
    out = writer(tmp_path)
    out.add(np.arange(9))
    assert list(tmp_path.glob("*.npy")) == []
    out.add(np.arange(9))
    assert [path.name for path in tmp_path.glob("*.npy")] == ["00000.npy"]
