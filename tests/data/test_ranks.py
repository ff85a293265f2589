"""Several ranks open one section: rank 0 looks for all, and what is wrong is wrong everywhere."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.data.web_server import CONTENT, Server
from tests.runs import environment
from tests.served import free_port

PROGRAM = """
import json, os, sys
import torch.distributed as dist
from olmo_hf.data import build
from olmo_hf.data.args import DataArgs
from olmo_hf.data.order import DataPosition
from olmo_hf.errors import DataError

dist.init_process_group("gloo")
rank = dist.get_rank()
check_files, copied_files = build.check_files, build.copied_files
checked = []

def counted(*args, **more):
    checked.append(1)
    return check_files(*args, **more)

def broken(*args):
    raise RuntimeError("the disk of this machine is full")

build.check_files = counted
for line in sys.stdin:
    options = json.loads(line)
    os.chdir(options["folders"][rank])
    build.copied_files = broken if options["broken"] == rank else copied_files
    checked.clear()
    said, ids = "", []
    try:
        args = DataArgs(token_dtype="uint16", sequence_length=10, **options["section"])
        data, _ = build.build_train_data(
            args, seed=1, eos_token_id=None, pad_token_id=None, vocab_size=500, global_train_batch_size=4,
            start=DataPosition(),
        )
        ids = [data[k]["input_ids"].tolist() for k in range(3)]
    except DataError as error:
        said = str(error)
    print(json.dumps({"said": said, "ids": ids, "checked": len(checked)}), flush=True)
"""

Ask = Callable[..., list[dict]]


@pytest.fixture(scope="module")
def processes() -> Iterator[list[subprocess.Popen]]:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment(RANK=str(rank), **address), **pipes)
        for rank in range(2)
    ]
    yield started
    for process in started:
        process.communicate(timeout=60)


@pytest.fixture
def open_on_two(processes: list[subprocess.Popen], tmp_path: Path) -> Ask:
    def ask(section: dict, *, folders: list[Path] | None = None, broken: int = -1) -> list[dict]:
        """What two ranks found, each in a working directory of its own."""
        where = [str(folder) for folder in ([tmp_path, tmp_path] if folders is None else folders)]
        line = json.dumps({"section": section, "folders": where, "broken": broken})
        for process in processes:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in processes]

    return ask


def test_only_rank_0_checks_and_asks_a_server(open_on_two: Ask, server: Server) -> None:
    urls = [server.url(f"/{i}.npy") for i in range(5)]
    server.files = {f"/{i}.npy": CONTENT.tobytes() for i in range(5)}
    first, second = open_on_two({"paths": urls})
    assert first["said"] == second["said"] == ""
    assert first["ids"] == second["ids"]
    assert len(first["ids"]) == 3
    assert (first["checked"], second["checked"]) == (1, 0)
    # Twice by rank 0 (what they are; before their ids are looked at), and once by each rank about the files it reads:
    # three instances, from three files at most.
    assert len(server.looks) <= 2 * 5 + 2 * 3
    assert len([path for path, asked in server.reads if asked == "bytes=0-1999"]) == 2 * 5


def test_a_problem_that_only_rank_0_looks_for_is_raised_by_both(open_on_two: Ask, tmp_path: Path) -> None:
    np.full(1_000, 700, np.uint16).tofile(tmp_path / "a.npy")
    first, second = open_on_two({"paths": ["a.npy"], "check": "full"})
    assert "token 0 is id 700, but the model's vocabulary has 500" in first["said"]
    assert first["said"] == second["said"]


def test_a_file_that_one_machine_lacks(open_on_two: Ask, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        os.mkdir(folder)
    CONTENT.tofile(folders[0] / "a.npy")
    first, second = open_on_two({"paths": ["a.npy"]}, folders=folders)
    assert "rank 1: a.npy: cannot be read (No such file or directory)" in first["said"]
    assert first["said"] == second["said"]


def test_an_error_of_any_kind_on_one_rank(open_on_two: Ask, tmp_path: Path) -> None:
    CONTENT.tofile(tmp_path / "a.npy")
    for broken in range(2):
        first, second = open_on_two({"paths": ["a.npy"]}, broken=broken)
        assert f"rank {broken}: the disk of this machine is full" in first["said"]
        assert first["said"] == second["said"]
