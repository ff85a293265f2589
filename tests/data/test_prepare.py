"""Preparation as a whole: the same files, whoever works on them and however often they are killed."""

import argparse
import errno
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest

from olmo_hf.cli import prepare_data as cli
from olmo_hf.data import document_sources, token_writer
from olmo_hf.data.manifest import Manifest, file_sha256, read_manifest
from olmo_hf.data.prepare import STATE_NAME, prepare_data
from olmo_hf.data.prepare_options import PrepareOptions, choose_dtype
from olmo_hf.data.tokenizer_files import EOS_TOKEN, PAD_TOKEN, raw_tokenizer, save_tokenizer, train_tokenizer
from olmo_hf.errors import DataError
from tests.runs import environment

RNG = np.random.default_rng(0)
WORDS = ["alpha", "beta", "gamma", "delta", "12345", "x_y", "\n", "  ", "(a, b)", "caf\u00e9"]
DOCUMENTS = [" ".join(RNG.choice(WORDS, RNG.integers(1, 60))) + f" #{i}" for i in range(300)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(iter(DOCUMENTS), 300), folder, eos_token=EOS_TOKEN, pad_token=PAD_TOKEN)
    return str(folder)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Small batches, so that a few hundred documents make many.
    monkeypatch.setattr(document_sources, "BATCH_DOCUMENTS", 16)
    path = tmp_path / "source.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    return path


def options(source: Path, output: Path, tokenizer: str, **changes) -> PrepareOptions:
    settings = dict(sources=(str(source),), output=str(output), tokenizer=tokenizer, max_tokens_per_file=1_000)
    return PrepareOptions(**{**settings, **changes})


def snapshot(output: Path) -> dict[str, str]:
    return {str(p.relative_to(output)): file_sha256(p) for p in sorted(output.rglob("*")) if p.is_file()}


def documents_of(folder: Path, manifest: Manifest) -> list[list[int]]:
    """Documents without their end-of-text token; fails when a file does not end with one."""
    found: list[list[int]] = []
    for file in manifest.files:
        tokens = np.fromfile(folder / file.path, manifest.token_dtype)
        assert tokens[-1] == manifest.eos_token_id
        pieces = np.split(tokens, np.flatnonzero(tokens == manifest.eos_token_id) + 1)[:-1]
        assert len(pieces) == file.num_documents
        found += [piece[:-1].tolist() for piece in pieces]
    return found


def test_every_document_once_and_one_end_of_text_each(source: Path, tmp_path: Path, tokenizer: str) -> None:
    output = tmp_path / "out"
    report = prepare_data(options(source, output, tokenizer))
    raw = raw_tokenizer(tokenizer)
    texts = []
    for split, manifest in report.manifests.items():
        assert read_manifest(output / split) == manifest
        documents = documents_of(output / split, manifest)
        assert len(documents) == manifest.num_documents
        assert sum(file.num_tokens for file in manifest.files) == manifest.num_tokens
        assert max(file.num_tokens for file in manifest.files) <= 1_000
        for file in manifest.files:
            assert file.sha256 == file_sha256(output / split / file.path)
            assert file.size_bytes == 2 * file.num_tokens
        texts += [raw.decode(ids) for ids in documents]
    assert set(report.manifests) == {"train", "validation"}
    assert len(report.manifests["train"].files) > 3
    assert sorted(texts) == sorted(DOCUMENTS)
    assert (output / "tokenizer" / "tokenizer.json").is_file()
    manifest = report.manifests["train"]
    assert manifest.tokenizer_sha256 == file_sha256(output / manifest.tokenizer.removeprefix("../") / "tokenizer.json")
    assert not list(output.rglob(".*"))


def test_the_number_of_processes_changes_nothing(source: Path, tmp_path: Path, tokenizer: str) -> None:
    results = []
    for workers in (0, 1, 2):
        prepare_data(options(source, tmp_path / f"w{workers}", tokenizer, num_workers=workers))
        results.append(snapshot(tmp_path / f"w{workers}"))
    assert results[0] == results[1] == results[2]


class Killed(Exception):
    """Stands for a kill between two batches."""


@pytest.mark.parametrize("after_batch", [0, 3, 10, 18])
@pytest.mark.parametrize("state_interval_seconds", [0.0, 1e9])
def test_stopped_anywhere_and_continued(
    source: Path, tmp_path: Path, tokenizer: str, after_batch: int, state_interval_seconds: float
) -> None:
    prepare_data(options(source, tmp_path / "whole", tokenizer))
    asked = options(source, tmp_path / "out", tokenizer, state_interval_seconds=state_interval_seconds)

    for last in (after_batch // 2, after_batch):

        def stop(batch, last: int = last) -> None:
            if batch.number == last:
                raise Killed

        with pytest.raises(Killed):
            prepare_data(asked, on_batch=stop)
    done: list[int] = []
    prepare_data(asked, on_batch=lambda batch: done.append(batch.number))
    assert done == list(range(0 if state_interval_seconds else after_batch, 19))
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


KILLED_PROGRAM = """
import sys, time
from olmo_hf.data import document_sources, token_writer
document_sources.BATCH_DOCUMENTS = 16
from olmo_hf.data.prepare import prepare_data
from olmo_hf.data.prepare_options import PrepareOptions
source, output, tokenizer, workers = sys.argv[1:]
def slowly(batch):
    print(batch.number, flush=True)
    time.sleep(0.05)
prepare_data(
    PrepareOptions(sources=(source,), output=output, tokenizer=tokenizer, max_tokens_per_file=1000,
                   num_workers=int(workers), state_interval_seconds=0.1),
    on_batch=slowly,
)
"""


def test_killed_for_real_with_workers(source: Path, tmp_path: Path, tokenizer: str) -> None:
    prepare_data(options(source, tmp_path / "whole", tokenizer))
    arguments = [sys.executable, "-c", KILLED_PROGRAM, str(source), str(tmp_path / "out"), tokenizer, "1"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 8:
            break
    # The program, its worker, the server that started it, and the one that keeps count of resources.
    assert len(_living(process.pid)) >= 3
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "out" / STATE_NAME).is_file()
    assert json.loads((tmp_path / "out" / STATE_NAME).read_text())["next_batch"] > 0
    prepare_data(options(source, tmp_path / "out", tokenizer))
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")
    # The orphaned worker notices and ends.
    deadline = time.monotonic() + 30
    while _living(process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert _living(process.pid) == []


def _living(leader: int) -> list[int]:
    """Living processes of the program and of what it started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, leading = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(leading) == leader and state != "Z":
            found.append(int(folder.name))
    return found


def test_a_finished_one_is_not_done_again_and_another_is_refused(source: Path, tmp_path: Path, tokenizer: str) -> None:
    output = tmp_path / "out"
    first = prepare_data(options(source, output, tokenizer))
    before = snapshot(output)
    again = prepare_data(options(source, output, tokenizer, num_workers=3))
    assert again.manifests == first.manifests
    assert again.num_tokens_now == 0
    with pytest.raises(DataError, match="holds other token files already; choose another --output"):
        prepare_data(options(source, output, tokenizer, validation_fraction=0.5))
    assert snapshot(output) == before


def test_a_half_done_one_with_other_options_is_refused(source: Path, tmp_path: Path, tokenizer: str) -> None:
    def stop(batch) -> None:
        raise Killed

    with pytest.raises(Killed):
        prepare_data(options(source, tmp_path / "out", tokenizer), on_batch=stop)
    with pytest.raises(DataError, match="half-done preparation with other options or of sources that changed"):
        prepare_data(options(source, tmp_path / "out", tokenizer, max_documents=5))
    source.write_text(source.read_text() + json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(DataError, match="half-done preparation"):
        prepare_data(options(source, tmp_path / "out", tokenizer))


def test_spelled_out_special_tokens_end_no_document(tmp_path: Path, tokenizer: str) -> None:
    texts = [f"before {EOS_TOKEN} after", EOS_TOKEN, f"x{PAD_TOKEN}", "   ", ""]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    report = prepare_data(options(tmp_path / "s.jsonl", tmp_path / "out", tokenizer, validation_fraction=0.0))
    documents = documents_of(tmp_path / "out" / "train", report.manifests["train"])
    raw = raw_tokenizer(tokenizer)
    assert [raw.decode(ids) for ids in documents] == texts[:3]
    assert report.num_empty == 2
    assert set(report.manifests) == {"train"}


def test_a_document_longer_than_a_file_is_not_cut(tmp_path: Path, tokenizer: str) -> None:
    texts = ["a b c", "alpha beta " * 500, "d e f"]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    report = prepare_data(
        options(tmp_path / "s.jsonl", tmp_path / "out", tokenizer, validation_fraction=0.0, max_tokens_per_file=100)
    )
    manifest = report.manifests["train"]
    assert [file.num_documents for file in manifest.files] == [1, 1, 1]
    assert manifest.files[1].num_tokens > 500
    raw = raw_tokenizer(tokenizer)
    assert [raw.decode(ids) for ids in documents_of(tmp_path / "out" / "train", manifest)] == texts


def test_bad_documents_are_counted_named_and_limited(tmp_path: Path, tokenizer: str) -> None:
    lines = [json.dumps({"text": "good"}), "{", json.dumps({"other": 1}), json.dumps({"text": 5}), ""]
    (tmp_path / "s.jsonl").write_text("\n".join(lines) + "\n")
    asked = options(tmp_path / "s.jsonl", tmp_path / "out", tokenizer, validation_fraction=0.0)
    report = prepare_data(replace(asked, max_bad_documents=4))
    assert report.num_bad == 4
    assert report.bad is not None
    assert [text.split(":")[1] for text in report.bad] == ["2", "3", "4", "5"]
    with pytest.raises(DataError, match="4 documents cannot be used, more than the 3"):
        prepare_data(replace(asked, output=str(tmp_path / "other"), max_bad_documents=3))


def test_when_nothing_can_be_used_it_is_said_why(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "s.jsonl").write_bytes('{"text": "a"}\n'.encode("utf-16"))
    asked = options(tmp_path / "s.jsonl", tmp_path / "out", tokenizer)
    with pytest.raises(DataError, match=r"no document with text; check --pattern and --text-column\n  - .*s\.jsonl:1"):
        prepare_data(asked)


@pytest.mark.parametrize("content", ["{}", "[]", '{"finger', "\x00"])
def test_a_state_that_means_nothing_is_named(source: Path, tmp_path: Path, tokenizer: str, content: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / STATE_NAME).write_text(content)
    with pytest.raises(
        DataError, match=r"prepare-state\.json: cannot be understood \(.*\); remove .*out and start again"
    ):
        prepare_data(options(source, tmp_path / "out", tokenizer))


def test_the_seed_of_pythons_hashes_changes_nothing(tmp_path: Path, tokenizer: str) -> None:
    """The order of the sources is that of their names, not that of a set of them."""
    for i, text in enumerate(DOCUMENTS[:40]):
        (tmp_path / "tree" / f"part{i % 7}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / f"part{i % 7}" / f"{i}.txt").write_text(text)
    program = (
        "import sys\nfrom olmo_hf.data.prepare import *\n"
        "prepare_data(PrepareOptions(sources=(sys.argv[1],), output=sys.argv[2], tokenizer=sys.argv[3]))"
    )
    for seed in ("1", "2"):
        words = [sys.executable, "-c", program, str(tmp_path / "tree"), str(tmp_path / f"out{seed}"), tokenizer]
        subprocess.run(words, check=True, env=environment(PYTHONHASHSEED=seed))
    assert snapshot(tmp_path / "out1") == snapshot(tmp_path / "out2")


def test_a_datasets_data_set(tmp_path: Path, tokenizer: str) -> None:
    data = datasets.Dataset.from_dict({"body": DOCUMENTS[:50]})
    data.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict({"test": data}).save_to_disk(str(tmp_path / "splits"))
    for name, split in (("plain", "train"), ("splits", "test")):
        report = prepare_data(
            PrepareOptions(
                dataset=str(tmp_path / name),
                dataset_split=split,
                text_column="body",
                output=str(tmp_path / f"out-{name}"),
                tokenizer=tokenizer,
                validation_fraction=0.0,
            )
        )
        raw = raw_tokenizer(tokenizer)
        documents = documents_of(tmp_path / f"out-{name}" / "train", report.manifests["train"])
        assert [raw.decode(ids) for ids in documents] == DOCUMENTS[:50]
    with pytest.raises(DataError, match="has no column 'text', but body"):
        prepare_data(PrepareOptions(dataset=str(tmp_path / "plain"), output=str(tmp_path / "o"), tokenizer=tokenizer))


def test_another_data_set_under_the_same_name_is_refused(tmp_path: Path, tokenizer: str) -> None:
    wanted = PrepareOptions(dataset=str(tmp_path / "data"), output=str(tmp_path / "out"), tokenizer=tokenizer)
    datasets.Dataset.from_dict({"text": DOCUMENTS[:50]}).save_to_disk(wanted.dataset)
    first = prepare_data(wanted)
    assert first.num_tokens_now > 0
    again = prepare_data(wanted)
    assert (again.num_tokens_now, again.manifests) == (0, first.manifests), "finished already"
    shutil.rmtree(wanted.dataset)
    datasets.Dataset.from_dict({"text": DOCUMENTS[50:90]}).save_to_disk(wanted.dataset)
    with pytest.raises(DataError, match="other"):
        prepare_data(wanted)


def test_a_data_set_of_plain_files(tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `load_dataset` reads, whole and broken."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = tmp_path / "data" / "train.jsonl"
    source.parent.mkdir()
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS[:50]))
    wanted = PrepareOptions(
        dataset=str(source.parent), output=str(tmp_path / "out"), tokenizer=tokenizer, validation_fraction=0.0
    )
    report = prepare_data(wanted)
    raw = raw_tokenizer(tokenizer)
    documents = documents_of(tmp_path / "out" / "train", report.manifests["train"])
    assert [raw.decode(ids) for ids in documents] == DOCUMENTS[:50]
    assert prepare_data(wanted).num_tokens_now == 0
    source.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(DataError, match=r"--dataset: .*data \(split train\) cannot be loaded \(.*JSON"):
        prepare_data(replace(wanted, output=str(tmp_path / "broken")))


def test_a_data_set_that_is_not_there(tmp_path: Path, tokenizer: str) -> None:
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["x"]})}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match=r"--dataset: .*splits \(split train\) cannot be loaded"):
        prepare_data(PrepareOptions(dataset=str(tmp_path / "splits"), output=str(tmp_path / "o"), tokenizer=tokenizer))


def test_a_trained_tokenizer_does_not_see_the_validation_split(tmp_path: Path) -> None:
    texts = [
        f"document {i} " + ("zebra" if document_sources.in_validation(f"document {i} zebra", 0.2) else "yak")
        for i in range(400)
    ]
    texts = [t for t in texts if t.endswith("zebra") == document_sources.in_validation(t, 0.2)]
    assert any(t.endswith("zebra") for t in texts)
    (tmp_path / "s.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare_data(
        PrepareOptions(
            sources=(str(tmp_path / "s.jsonl"),),
            output=str(tmp_path / "out"),
            train_tokenizer=280,
            validation_fraction=0.2,
        )
    )
    raw = raw_tokenizer(tmp_path / "out" / "tokenizer")
    assert len(raw.encode(" yak").ids) == 1
    assert len(raw.encode(" zebra").ids) > 3


def test_types() -> None:
    assert choose_dtype("auto", 65_536) == "uint16"
    assert choose_dtype("auto", 65_537) == "uint32"
    assert choose_dtype("uint32", 300) == "uint32"
    with pytest.raises(DataError, match="uint16 holds ids up to 65,535, but the tokenizer has 100,278"):
        choose_dtype("uint16", 100_278)
    with pytest.raises(DataError, match="found 'uint61'"):
        choose_dtype("uint61", 300)


def test_contradictions_are_refused_together() -> None:
    with pytest.raises(DataError) as caught:
        prepare_data(PrepareOptions(output="x", validation_fraction=1.0, num_workers=-1, max_documents=0))
    for part in (
        "--max-documents: found 0",
        "either source paths or --dataset",
        "--tokenizer or --train-tokenizer",
        "found 1.0",
        "found -1",
    ):
        assert part in str(caught.value)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = tmp_path / "tree"
    for i, text in enumerate(DOCUMENTS[:60]):
        (tree / f"part{i % 3}").mkdir(parents=True, exist_ok=True)
        (tree / f"part{i % 3}" / f"{i}.py").write_text(text)
    (tree / "part0" / "latin.py").write_bytes(b"# caf\xe9")
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    arguments = [str(tree), "--pattern", "*.py", "--exclude", "part2", "--output", str(tmp_path / "out")]
    namespace = parser.parse_args([*arguments, "--train-tokenizer", "300", "--validation-fraction", "0.1"])
    assert cli.run(namespace) == 0
    said = capsys.readouterr()
    train, validation = (read_manifest(tmp_path / "out" / split) for split in ("train", "validation"))
    assert train is not None
    assert validation is not None
    assert train.num_documents + validation.num_documents == 40
    assert f"{train.num_documents:,} documents, {train.num_tokens:,} tokens of uint16 in 1 file\n" in said.out
    assert "tokens/s" in said.err
    assert "left out: 1 document that cannot be read" in said.err
    assert "note: " not in said.err
    assert "latin.py" in said.err
    assert cli.run(namespace) == 0
    assert "finished already" in capsys.readouterr().out


def test_a_tokenizer_too_large_for_its_text_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "little.txt").write_text("the cat sat on the mat\n" * 20)
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    words = [str(tmp_path / "little.txt"), "--output", str(tmp_path / "out"), "--train-tokenizer", "4096"]
    assert cli.run(parser.parse_args([*words, "--validation-fraction", "0"])) == 0
    assert re.search(r"note: the text gave \d+ ids and not 4,096; .* smaller tokenizer", capsys.readouterr().err)


def test_an_output_that_cannot_be_written(source: Path, tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file/out: cannot be written \(Not a directory\)"):
        prepare_data(options(source, tmp_path / "file" / "out", tokenizer))


def test_a_full_disk_loses_nothing(
    source: Path, tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_data(options(source, tmp_path / "whole", tokenizer))
    asked = options(source, tmp_path / "out", tokenizer, state_interval_seconds=0.0)
    real, calls = token_writer.os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 30:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(token_writer.os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\); mend that and run the same"):
        prepare_data(asked)
    monkeypatch.undo()
    monkeypatch.setattr(document_sources, "BATCH_DOCUMENTS", 16)
    prepare_data(asked)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_two_at_once_are_kept_apart(source: Path, tmp_path: Path, tokenizer: str) -> None:
    asked = options(source, tmp_path / "out", tokenizer)

    def second(batch) -> None:
        with pytest.raises(DataError, match="another preparation is writing there"):
            prepare_data(asked)

    prepare_data(asked, on_batch=second)
