"""Checkpoints that nobody wrote: whatever their files hold, they are passed over or refused in one of our messages.

Two kinds. Damaged: a file changed behind the manifest's back, as a bad disk does it. Forged: the manifest fits what
is there, as after an edit by hand, so only what reads the file can notice.
"""

import dataclasses
import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from olmo_hf.errors import OlmoHfError
from olmo_hf.training import checkpoints, commit
from olmo_hf.training.disk import Disk
from olmo_hf.training.rotation import Keep
from olmo_hf.training.run_directory import CONFIG_FILE, open_run
from olmo_hf.training.saving import CheckpointSaver
from olmo_hf.training.snapshot import Snapshot
from olmo_hf.training.state import load_run_state
from tests.training.test_saving import snapshot

REUSES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
READ_AGAIN = ("run_state.json", "rng_state_0.json", "optimizer.json", "optimizer.safetensors", "model.safetensors")
"""Files from which a run goes on."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
DEEP = b"[" * 100_000
CONTENTS = st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Snapshot]:
    """A run directory with whole checkpoints 2 and 4, and the run as it stands in memory."""
    directory, stands = tmp_path_factory.mktemp("run"), snapshot(2)
    saver = CheckpointSaver(directory, keep=Keep(), disk=Disk())
    for step in (2, 4):
        stands.run_state.step = stands.trainer_state.global_step = step
        saver.save(stands, kind="unsharded", has_optimizer=True)
    (directory / CONFIG_FILE).write_text("name: mine\n")
    return directory, stands


@pytest.fixture
def random_states_return():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def go_on(run_dir: Path, stands: Snapshot) -> tuple[int, list[str]]:
    """What a launch does with a run directory before its first step; the step it goes on from, and what it refused."""
    try:
        with open_run(run_dir, resume="auto", name="mine") as opened:
            assert opened.checkpoint is not None
            checkpoints.restore_tensors(opened.checkpoint, stands.model, stands.optimizer)
            checkpoints.restore_rng(opened.checkpoint, opened.state.world_size, 1)
            return opened.state.step, []
    except OlmoHfError as error:
        return -1, [str(error)]


def fresh_copy(run_dir: Path, work: Path) -> Path:
    """The run directory again, whatever an example before left of it."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(run_dir, work, symlinks=True)
    return work


def forge(checkpoint: Path, name: str, content: bytes) -> None:
    """Other content, and a manifest that fits it."""
    (checkpoint / name).write_bytes(content)
    manifest = commit.read_manifest(checkpoint)
    entry = {"size": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    commit.write_manifest(checkpoint, dataclasses.replace(manifest, files=manifest.files | {name: entry}))


def changed_bytes(content: bytes, place: float, new: bytes) -> bytes:
    """The content with some bytes replaced."""
    first = int(place * len(content))
    return content[:first] + new + content[first + len(new) :]


@REUSES
@given(data=st.data())
def test_any_damage_is_passed_over(run: tuple[Path, Snapshot], tmp_path: Path, data: st.DataObject) -> None:
    work = fresh_copy(run[0], tmp_path / "run")
    names = sorted(path.name for path in (work / "checkpoint-4").iterdir())
    path = work / "checkpoint-4" / data.draw(st.sampled_from(names))
    before = path.read_bytes()
    way = data.draw(st.sampled_from(["other", "cut", "changed", "gone", "directory"]))
    if way in ("gone", "directory"):
        path.unlink()
    if way == "directory":
        path.mkdir()
    elif way == "other":
        path.write_bytes(data.draw(CONTENTS))
    elif way == "cut":
        path.write_bytes(before[: data.draw(st.integers(0, max(len(before) - 1, 0)))])
    elif way == "changed":
        place = data.draw(st.floats(0, 1, exclude_max=True))
        path.write_bytes(changed_bytes(before, place, data.draw(st.binary(min_size=1, max_size=20))))
    same = path.is_file() and path.read_bytes() == before
    newest, passed_over = commit.newest_whole(work)
    assert newest == work / f"checkpoint-{4 if same else 2}"
    assert len(passed_over) == (0 if same else 1)
    assert all(path.name in text or commit.MANIFEST in text for text in passed_over)


@REUSES
@example(name="run_state.json", content=DEEP)
@example(name="rng_state_0.json", content=DEEP)
@example(name="rng_state_0.json", content=b"{}")
@example(name="run_state.json", content=b"[]")
@given(name=st.sampled_from(READ_AGAIN), content=CONTENTS | st.just(DEEP))
def test_any_content_that_the_manifest_vouches_for_is_refused_in_words(
    run: tuple[Path, Snapshot], tmp_path: Path, random_states_return: None, name: str, content: bytes
) -> None:
    run_dir, stands = run
    work = fresh_copy(run_dir, tmp_path / "run")
    forge(work / "checkpoint-4", name, content)
    step, said = go_on(work, stands)
    assert step == 4 or len(said) == 1
    if name in ("run_state.json", "rng_state_0.json"):
        assert all(name in text for text in said)


@REUSES
@given(key=st.sampled_from(["step", "tokens", "position", "world_size", "callbacks", "identity", "other"]), value=JSON)
def test_any_field_of_the_state(run: tuple[Path, Snapshot], tmp_path: Path, key: str, value: Any) -> None:
    run_dir, _ = run
    fields = json.loads((run_dir / "checkpoint-4" / "run_state.json").read_text()) | {key: value}
    (tmp_path / "run_state.json").write_text(json.dumps(fields))
    found, said = None, ""
    try:
        found = load_run_state(tmp_path)
    except OlmoHfError as error:
        said = str(error)
    if found is None:
        assert "run_state.json" in said
    else:
        assert isinstance(found.step, int)
        assert found.step >= 0
        assert isinstance(found.position.instances, int)
        assert isinstance(found.callbacks, dict)


@REUSES
@given(key=st.sampled_from([field.name for field in dataclasses.fields(commit.Manifest)] + ["other"]), value=JSON)
def test_any_field_of_the_manifest(run: tuple[Path, Snapshot], tmp_path: Path, key: str, value: Any) -> None:
    """Without its own checksum, as a manifest of another hand would come."""
    run_dir, stands = run
    work = fresh_copy(run_dir, tmp_path / "run")
    path = work / "checkpoint-4" / commit.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"xxh3_128": "", key: value}))
    step, said = go_on(work, stands)
    assert step in (2, 4) or len(said) == 1


@REUSES
@given(content=st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_any_settings_of_a_run_that_is_gone_on_with(
    run: tuple[Path, Snapshot], tmp_path: Path, content: bytes
) -> None:
    run_dir, stands = run
    work = fresh_copy(run_dir, tmp_path / "run")
    (work / CONFIG_FILE).write_bytes(content)
    step, said = go_on(work, stands)
    assert step == 4 or len(said) == 1
