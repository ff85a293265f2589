"""Batches encoded here and in other processes."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from olmo_hf.data.document_sources import DocumentBatch
from olmo_hf.data.encode_documents import BatchEncoder, EncoderSettings, encode_batches
from olmo_hf.data.tokenizer_files import EOS_TOKEN, TRICKY_TEXTS, raw_tokenizer, save_tokenizer, train_tokenizer
from olmo_hf.errors import DataError


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EncoderSettings:
    folder = tmp_path_factory.mktemp("tokenizer")
    files = save_tokenizer(train_tokenizer(iter(TRICKY_TEXTS * 3), 300), folder, eos_token=EOS_TOKEN)
    return EncoderSettings(tokenizer=files, column="text", messages=False, validation_fraction=0.5)


def batches(count: int) -> list[DocumentBatch]:
    texts = list(TRICKY_TEXTS)
    return [
        DocumentBatch(n, "rows", [f"{n} {text}" for text in texts], [f"row {i}" for i in range(len(texts))], 10)
        for n in range(count)
    ]


def test_a_batch(settings: EncoderSettings) -> None:
    batch = DocumentBatch(7, "rows", ["one", 2, "", "two three"], ["r0", "r1", "r2", "r3"], 99)
    encoded = BatchEncoder(settings)(batch)
    assert (encoded.number, encoded.size_bytes, encoded.num_empty) == (7, 99, 1)
    assert encoded.bad == ["r1: 'text' is no text but int"]
    raw = raw_tokenizer(settings.tokenizer.folder)
    pieces = np.split(encoded.tokens, np.cumsum(encoded.lengths)[:-1])
    assert [raw.decode(piece.tolist()) for piece in pieces] == ["one", "two three"]
    assert all(piece[-1] == settings.tokenizer.eos_token_id for piece in pieces)
    assert encoded.validation.shape == (2,)


def test_batches_come_in_order(settings: EncoderSettings) -> None:
    here = list(encode_batches(batches(12), settings, num_workers=0))
    there = list(encode_batches(batches(12), settings, num_workers=2))
    assert [batch.number for batch in there] == list(range(12))
    for first, second in zip(here, there, strict=True):
        assert np.array_equal(first.tokens, second.tokens)
        assert np.array_equal(first.lengths, second.lengths)
        assert np.array_equal(first.validation, second.validation)


def test_few_batches_wait(settings: EncoderSettings) -> None:
    taken: list[int] = []

    def source():
        for batch in batches(40):
            taken.append(batch.number)
            yield batch

    encoded = encode_batches(source(), settings, num_workers=1)
    next(encoded)
    assert len(taken) <= 4
    encoded.close()


def test_a_worker_that_dies_is_an_error_not_a_wait(settings: EncoderSettings) -> None:
    encoded = encode_batches(batches(60), settings, num_workers=1)
    next(encoded)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    workers = [
        int(worker)
        for child in children
        for worker in Path(f"/proc/{child}/task/{child}/children").read_text().split()
    ]
    assert workers
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    with pytest.raises(DataError, match="a worker process ended without a word"):
        list(encoded)
