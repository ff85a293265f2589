"""Orders kept on disk."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from olmo_hf.data import order_index
from olmo_hf.data.epoch_order import global_indices
from olmo_hf.data.order_index import default_index_dir, open_index
from olmo_hf.errors import DataError

RESHUFFLE = json.loads((Path(__file__).parents[1] / "golden/03_data_order/reshuffle.json").read_text())


def test_the_file_is_the_originals(tmp_path: Path) -> None:
    case = next(c for c in RESHUFFLE if c["with_work_dir"] and c["dataset_size"] == 37)
    order = open_index(str(tmp_path), 37, seed=case["seed"], epoch=2)
    assert order.tolist() == case["after_reshuffle_2"]
    (path,) = tmp_path.glob("*.u32")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == case["global_indices_file_bytes_sha256"]


def test_made_once_and_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = global_indices(1_000, seed=3, epoch=0)
    assert np.array_equal(open_index(str(tmp_path), 1_000, seed=3, epoch=0), expected)
    monkeypatch.setattr(order_index, "global_indices", None)
    assert np.array_equal(open_index(str(tmp_path), 1_000, seed=3, epoch=0), expected)
    # The order of epoch 1 of seed 2 is the same table.
    assert np.array_equal(open_index(str(tmp_path), 1_000, seed=2, epoch=1), expected)


def test_half_a_file_is_made_anew(tmp_path: Path) -> None:
    expected = np.array(open_index(str(tmp_path), 1_000, seed=3, epoch=0))
    (path,) = tmp_path.glob("*.u32")
    os.truncate(path, 100)
    assert np.array_equal(open_index(str(tmp_path), 1_000, seed=3, epoch=0), expected)


PROGRAM = """
import sys
from olmo_hf.data import order_index
original = order_index.global_indices
def counted(*args, **kwargs):
    print("made", flush=True)
    return original(*args, **kwargs)
order_index.global_indices = counted
print(int(order_index.open_index(sys.argv[1], 1_000_000, seed=0, epoch=0)[0]))
"""


def test_of_many_processes_one_makes_it(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate()[0].split() for process in processes]
    assert sum(output.count("made") for output in outputs) == 1
    assert {output[-1] for output in outputs} == {str(global_indices(1_000_000, seed=0, epoch=0)[0])}


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"set data\.index_dir to a local directory with 4,000 free bytes"):
        open_index(str(tmp_path / "file" / "x"), 1_000, seed=0, epoch=0)


def test_small_orders_stay_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert default_index_dir(2**24) is None
    assert default_index_dir(2**24 + 1) == str(tmp_path / "olmo_hf" / "order")
