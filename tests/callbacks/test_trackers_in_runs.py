"""Trackers in real runs: continued under one id, on the step axis, and without power over the run."""

import json
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from wandb.proto import wandb_internal_pb2

from olmo_hf.callbacks.json_lines import METRICS_FILE, read_json_lines
from olmo_hf.callbacks.trackers import TRACKER_ID_FILE
from tests import runs
from tests.callbacks.wandb_server import WandbServer


def records(file: Path) -> Iterator[bytes]:
    """What an offline run wrote: a log as LevelDB has them (blocks of 32 KiB, 7 bytes before each piece)."""
    data, place, pending = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        pending += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield pending
            pending = b""


def history(run_dir: Path) -> list[tuple[str, list[dict]]]:
    """Run id and logged rows of every offline launch, oldest first."""
    found = []
    for directory in sorted((run_dir / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime):
        (file,) = directory.glob("run-*.wandb")
        rows = []
        for data in records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                keys = [(item.key or "/".join(item.nested_key), item.value_json) for item in record.history.item]
                rows.append({key: json.loads(value) for key, value in keys})
        found.append((directory.name.rsplit("-", 1)[-1], rows))  # the run's id ends the name
    return found


def test_offline_and_tensorboard_go_on_under_one_id_after_going_back(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    )
    config, run_dir = runs.write_run(tmp_path, save_interval_ephemeral=None), tmp_path / "run"
    env = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    words = ("--training.report_to=[wandb,tensorboard]",)
    process = runs.start(config, *words, "--callbacks.loss_spike=null", **env)
    runs.kill_when(process, lambda: 9 in runs.logged_steps(run_dir))
    runs.run(config, *words, **env)
    launches = history(run_dir)
    assert len(launches) == 2
    assert {run_id for run_id, _ in launches} == {(run_dir / TRACKER_ID_FILE).read_text().strip()}
    second = [row for row in launches[1][1] if "train/CrossEntropyLoss" in row]
    assert [row["train/global_step"] for row in second] == list(range(7, 13)), "from the checkpoint of step 6 on"
    logged = {row["step"]: row for row in read_json_lines(run_dir / METRICS_FILE) if "train/CrossEntropyLoss" in row}
    for row in second:
        for key in ("train/CrossEntropyLoss", "optim/total_grad_norm", "throughput/total_tokens"):
            assert row[key] == logged[row["train/global_step"]][key]
    reader = event_accumulator.EventAccumulator(str(run_dir / "tensorboard"))
    reader.Reload()
    points = {event.step: event.value for event in reader.Scalars("train/CrossEntropyLoss")}
    assert sorted(points) == list(range(1, 13))
    # TensorBoard keeps float32.
    assert points[12] == pytest.approx(logged[12]["train/CrossEntropyLoss"], rel=1e-6)


@pytest.mark.takes(23, "wandb's own process is started, waits for the server, and is waited for at the end")
def test_a_server_that_is_not_there_holds_nothing_up_for_long(undisturbed: Path, tmp_path: Path) -> None:
    config = runs.write_run(tmp_path, save_interval_ephemeral=None)
    env = {
        "WANDB_MODE": "online",
        "WANDB_BASE_URL": "http://127.0.0.1:9",  # nobody listens
        "WANDB_API_KEY": "0" * 40,
        "WANDB_INIT_TIMEOUT": "3",
        "WANDB_FINISH_TIMEOUT": "3",
    }
    began = time.monotonic()
    text = runs.run(config, "--training.report_to=[wandb]", **env)
    assert time.monotonic() - began < 60
    assert "Training goes on, without it" in text
    assert "0" * 40 not in text, "a key is never in a log"
    runs.same_run(tmp_path / "run", undisturbed)


def test_a_tag_set_in_mid_run_stops_it_and_a_server_that_is_slow_or_fails_does_not(tmp_path: Path) -> None:
    server = WandbServer()
    config, run_dir = runs.write_run(tmp_path, max_duration=100_000, save_interval=None), tmp_path / "run"
    env = {
        "WANDB_MODE": "online",
        "WANDB_BASE_URL": server.url,
        "WANDB_API_KEY": "0" * 40,
        "WANDB_ENTITY": "someone",
        "WANDB_PROJECT": "project",
        "WANDB_SILENT": "true",
        "WANDB_FINISH_TIMEOUT": "5",
    }
    words = ("--training.report_to=[wandb]", "--callbacks.cancellation.wandb_poll_seconds=0.2")
    process = runs.start(config, *words, "--training.save_interval_ephemeral=null", **env)
    try:
        deadline = time.monotonic() + 120
        while server.asked_for_run < 2 and time.monotonic() < deadline:
            assert process.poll() is None, (tmp_path / "log.txt").read_text()[-2000:]
            time.sleep(0.02)
        server.slow_seconds = 60.0
        while server.held == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.5)  # what was on its way has come
        told, before = server.told_of_run, len(runs.logged_steps(run_dir))
        time.sleep(2)  # ten times as long as between two questions
        assert process.poll() is None, (tmp_path / "log.txt").read_text()[-2000:]
        assert len(runs.logged_steps(run_dir)) >= before + 5, "steps are trained while the server keeps its answers"
        assert server.told_of_run == told
        server.slow_seconds = 0.0
        server.broken = True
        before = len(runs.logged_steps(run_dir))
        asked = server.asked_for_run
        while server.asked_for_run < asked + 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(runs.logged_steps(run_dir)) > before, "a server that fails slows nothing down"
        server.tags, server.broken = ["cancel"], False
        assert process.wait(timeout=60) == 3
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        server.close()
    text = (tmp_path / "log.txt").read_text()
    found = re.search(r"Stopping at step (\d+) \(tag on the tracker\)", text)
    assert found is not None
    assert (run_dir / "latest").resolve().name == f"checkpoint-{found[1]}"
