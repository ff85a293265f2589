import gzip
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from olmo_hf.callbacks.args import DataIndicesArgs
from olmo_hf.callbacks.data_indices import (
    DataIndices,
    data_indices_path,
    iter_data_indices,
    read_data_indices,
    read_returns,
)
from olmo_hf.callbacks.json_lines import EVENTS_FILE, JsonLinesFile
from olmo_hf.data.order import DataPosition


def record(tmp_path: Path, flush_steps: int = 3) -> DataIndices:
    return DataIndices(DataIndicesArgs(flush_steps=flush_steps), run_dir=tmp_path, rank=0)


def train(callback: DataIndices, state, arguments, control, steps: range) -> None:
    for step in steps:
        state.global_step = step - 1
        callback.on_instances(state, [step * 10, step * 10 + 1])
        state.global_step = step
        callback.on_step_end(arguments, state, control)


def expected(steps: range) -> dict[int, list[int]]:
    return {step: [step * 10, step * 10 + 1] for step in steps}


def test_the_file_is_plain_gzip_and_says_which_step_read_what(tmp_path, arguments, state, control) -> None:
    callback = record(tmp_path)
    train(callback, state, arguments, control, range(1, 8))
    callback.on_train_end(arguments, state, control)
    path = data_indices_path(tmp_path, 0)
    assert path == tmp_path / "data-indices" / "rank0.tsv.gz"
    assert gzip.decompress(path.read_bytes()).decode().splitlines()[2] == "3\t30,31"
    assert read_data_indices(path) == expected(range(1, 8))
    assert read_data_indices(path, range(2, 4)) == expected(range(2, 4))


def test_flushed_every_n_steps_and_before_a_checkpoint(tmp_path, arguments, state, control) -> None:
    callback = record(tmp_path, flush_steps=3)
    path = data_indices_path(tmp_path, 0)
    train(callback, state, arguments, control, range(1, 3))
    assert not path.exists()
    train(callback, state, arguments, control, range(3, 5))
    assert read_data_indices(path) == expected(range(1, 4))
    assert callback.state_dict() == {}, "asked for when a checkpoint is written"
    assert read_data_indices(path) == expected(range(1, 5))
    control.should_save = True
    train(callback, state, arguments, control, range(5, 6))
    assert read_data_indices(path) == expected(range(1, 6))


@pytest.mark.parametrize("lost_bytes", [1, 9, 20])
def test_a_torn_member_is_passed_over_and_later_ones_are_read(tmp_path, arguments, state, control, lost_bytes) -> None:
    train(record(tmp_path), state, arguments, control, range(1, 7))
    path = data_indices_path(tmp_path, 0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-lost_bytes])
    assert read_data_indices(path) == expected(range(1, 4)), "the torn member holds steps 4 to 6"
    train(record(tmp_path), state, arguments, control, range(4, 10))
    assert read_data_indices(path) == expected(range(1, 10))


def test_never_truncated_and_after_going_back_the_later_lines_count(tmp_path, arguments, state, control) -> None:
    train(record(tmp_path), state, arguments, control, range(1, 10))
    size = data_indices_path(tmp_path, 0).stat().st_size
    callback = record(tmp_path)
    for step in (5, 6, 7):
        state.global_step = step - 1
        callback.on_instances(state, [-step])
    callback.on_save(arguments, state, control)
    path = data_indices_path(tmp_path, 0)
    assert path.stat().st_size > size
    assert read_data_indices(path) == {**expected(range(1, 5)), 5: [-5], 6: [-6], 7: [-7]}
    assert [step for step, _ in iter_data_indices(path)] == [*range(1, 10), 5, 6, 7], "the raw record keeps all"


def test_many_members_larger_than_one_read(tmp_path, arguments, state, control) -> None:
    callback = record(tmp_path, flush_steps=2)
    generator_state = 12345
    for step in range(1, 61):
        state.global_step = step - 1
        ids = []
        for _ in range(8000):
            generator_state = (1103515245 * generator_state + 12345) % 2**31
            ids.append(generator_state)
        callback.on_instances(state, ids)
        callback.on_step_end(arguments, state, control)
    path = data_indices_path(tmp_path, 0)
    assert path.stat().st_size > 2 << 20, "must span several reads"
    found = read_data_indices(path)
    assert list(found) == list(range(1, 61))
    assert found[60] == ids


def test_a_full_disk_neither_ends_the_run_nor_loses_ids(tmp_path, arguments, state, control, caplog) -> None:
    callback = record(tmp_path)
    train(callback, state, arguments, control, range(1, 4))
    path = data_indices_path(tmp_path, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 7, hard))
    try:
        train(callback, state, arguments, control, range(4, 9))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caplog.text.count("cannot be written") == 1
    callback.flush()
    assert read_data_indices(path) == expected(range(1, 9))


WRITER = """
import sys
from pathlib import Path
from transformers import TrainerState
from olmo_hf.callbacks.args import DataIndicesArgs
from olmo_hf.callbacks.data_indices import DataIndices
callback = DataIndices(DataIndicesArgs(flush_steps=1), run_dir=Path(sys.argv[1]), rank=0)
state = TrainerState()
for step in range(1, 10**9):
    state.global_step = step - 1
    callback.on_instances(state, list(range(step, step + 50)))
    callback.flush()
    print(step, flush=True)
"""


def test_readable_after_kill_9_and_appended_to(tmp_path, arguments, state, control) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    said = process.stdout.read().split()
    process.wait()
    path = data_indices_path(tmp_path, 0)
    found = read_data_indices(path)
    last = int(said[-1])
    assert set(range(1, last)) <= set(found), "what was flushed before the kill is there"
    assert all(found[step] == list(range(step, step + 50)) for step in found)
    train(record(tmp_path), state, arguments, control, range(last, last + 3))
    assert read_data_indices(path) == {step: found[step] for step in range(1, last)} | expected(range(last, last + 3))


def test_where_the_data_of_a_run_begin(tmp_path: Path) -> None:
    """A first launch may begin anywhere; a restart must go on where the run was, whatever it says of itself."""
    events = JsonLinesFile(tmp_path / EVENTS_FILE)

    def told(event: str, step: int, instances: int | None) -> list[tuple[int, DataPosition]]:
        position = {} if instances is None else {"position": {"epoch": 0, "instances": instances}}
        events.append({"event": event, "step": step, **position})
        return read_returns(tmp_path)

    assert told("start", 0, None) == []
    assert told("start", 0, 0) == [], "the order itself"
    (tmp_path / EVENTS_FILE).unlink()
    events = JsonLinesFile(tmp_path / EVENTS_FILE)
    assert told("start", 2, 24) == [(2, DataPosition(instances=24))]
    assert told("start", 4, 999) == [(2, DataPosition(instances=24))], "a restart"
    assert told("start", 2, 32) == [(2, DataPosition(instances=32))], "begun again before its first checkpoint"
    assert told("rollback", 6, 80) == [(2, DataPosition(instances=32)), (6, DataPosition(instances=80))]
    assert told("start", 5, 56) == [(2, DataPosition(instances=32))], "before it went back"
