"""Files that nobody meant to give: whatever they hold, the answer is data or one of our messages."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from olmo_hf.data.args import DataArgs
from olmo_hf.data.build import build_train_data
from olmo_hf.data.document_sources import (
    BadDocumentError,
    DocumentBatch,
    file_batches,
    list_source_files,
    read_document,
)
from olmo_hf.data.encode_documents import BatchEncoder, EncoderSettings
from olmo_hf.data.manifest import FORMAT, VERSION, Manifest, parse_manifest, read_manifest, write_manifest
from olmo_hf.data.order import DataPosition, OrderedDataset
from olmo_hf.data.token_files import TOKEN_DTYPES
from olmo_hf.data.tokenizer_files import save_tokenizer, train_tokenizer
from olmo_hf.errors import DataError

REUSES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@REUSES
@given(
    content=st.one_of(
        st.binary(max_size=400),
        st.binary(max_size=200).map(lambda rest: b"\x93NUMPY" + rest),
        st.binary(max_size=60).map(lambda rest: b"\x93NUMPY\x01\x00\x76\x00{'descr': '<u2', " + rest),
    ),
    dtype=st.sampled_from(sorted(TOKEN_DTYPES)),
    mask=st.one_of(st.none(), st.binary(max_size=400)),
    check=st.sampled_from(["quick", "full", "none"]),
    order=st.sampled_from(["shuffle", "permutation", "random_offsets"]),
)
def test_any_bytes_as_a_token_file(
    tmp_path: Path, content: bytes, dtype: str, mask: bytes | None, check: str, order: str
) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    (tmp_path / "a.mask").write_bytes(mask or b"")
    args = DataArgs(
        paths=(str(tmp_path / "a.npy"),),
        label_mask_paths=() if mask is None else (str(tmp_path / "a.mask"),),
        token_dtype=dtype,  # type: ignore[arg-type]
        sequence_length=4,
        check=check,  # type: ignore[arg-type]
        order=order,  # type: ignore[arg-type]
    )
    said = ""
    try:
        data, collator = build_train_data(
            args,
            seed=0,
            eos_token_id=0,
            pad_token_id=None,
            vocab_size=2**63,
            global_train_batch_size=2,
            start=DataPosition(),
        )
    except DataError as error:
        said = str(error)
    if said:
        assert "a.npy" in said or "a.mask" in said or "data." in said
        return
    batch = collator(data.__getitems__(range(2)))
    # A NumPy header is never read as tokens.
    begin = 0 if not content.startswith(b"\x93NUMPY") else 128
    tokens = np.frombuffer(content[begin:], np.dtype(dtype).newbyteorder("<"))
    for row, index in zip(batch["input_ids"], batch["index"].tolist(), strict=True):
        first = index if order == "random_offsets" else 4 * index
        assert row.numpy().astype(np.uint64).tolist() == tokens[first : first + 4].astype(np.uint64).tolist()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from([*Manifest.__dataclass_fields__, "format", "version", "other"])


@REUSES
@given(
    changes=st.dictionaries(KEYS, JSON, max_size=4),
    file_changes=st.dictionaries(
        st.sampled_from(["path", "num_tokens", "size_bytes", "sha256", "label_mask", "other"]), JSON, max_size=2
    ),
)
def test_any_manifest(tmp_path: Path, changes: dict, file_changes: dict) -> None:
    file = {"path": "a.npy", "num_tokens": 8, "num_documents": 1, "size_bytes": 16, "sha256": "0"}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "token_dtype": "uint16",
        "vocab_size": 100,
        "eos_token_id": 0,
        "pad_token_id": None,
        "tokenizer": "../tokenizer",
        "tokenizer_sha256": "",
        "num_documents": 1,
        "num_tokens": 8,
        "files": [{**file, **file_changes}],
        **changes,
    }
    np.arange(8, dtype=np.uint16).tofile(tmp_path / "a.npy")
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    args = DataArgs(paths=(str(tmp_path / "a.npy"),), sequence_length=4, check="full")
    said = "manifest"
    try:
        build_train_data(
            args,
            seed=0,
            eos_token_id=0,
            pad_token_id=None,
            vocab_size=100,
            global_train_batch_size=1,
            start=DataPosition(),
        )
    except DataError as error:
        said = str(error)
    assert "manifest" in said or "data.token_dtype" in said


@REUSES
@given(content=st.binary(max_size=300))
def test_any_bytes_as_a_manifest(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    found, said = None, "manifest.json: cannot be read"
    try:
        found = read_manifest(tmp_path)
    except DataError as error:
        said = str(error)
    assert found is None
    assert "manifest.json: cannot be read" in said


def test_json_nested_without_end_is_no_manifest() -> None:
    with pytest.raises(DataError, match="cannot be read"):
        parse_manifest("[" * 100_000, "m.json")


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    manifest = Manifest("uint16", 10, 0, None, "../tokenizer", "", 0, 0, ())
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest


@REUSES
@given(
    suffix=st.sampled_from([".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt"]),
    content=st.one_of(
        st.binary(max_size=300),
        st.lists(JSON, max_size=5).map(lambda rows: "\n".join(map(json.dumps, rows)).encode()),
        st.binary(max_size=60).map(lambda rest: b"PAR1" + rest + b"PAR1"),
        st.binary(max_size=60).map(lambda rest: b"\x1f\x8b\x08\x00" + rest),
        st.binary(max_size=60).map(lambda rest: b"\x28\xb5\x2f\xfd" + rest),
        st.integers(1_000, 200_000).map(lambda depth: b"[" * depth),
    ),
)
@example(suffix=".jsonl.gz", content=b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x00\x06")
def test_any_bytes_as_documents(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    batches, said = [], []
    try:
        batches = list(file_batches(list_source_files([str(path)]), column="text", max_documents=None))
    except DataError as error:
        said.append(str(error))
    for batch in batches:
        for one, place in zip(batch.contents, batch.places, strict=True):
            try:
                read_document(batch.kind, one, place, "text")
            except BadDocumentError as error:
                said.append(str(error))
    assert all(str(path) in text for text in said)


@pytest.fixture(scope="module", params=[False, True], ids=["text", "messages"])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BatchEncoder:
    folder = tmp_path_factory.mktemp("tokenizer")
    files = save_tokenizer(train_tokenizer(iter(["some text"]), 300), folder, eos_token="<|endoftext|>")
    settings = EncoderSettings(tokenizer=files, column="text", messages=request.param, validation_fraction=0.5)
    return BatchEncoder(settings)


SURROGATES = st.text(st.characters(exclude_categories=()), max_size=20)
MESSAGES = st.lists(
    st.fixed_dictionaries({}, optional={"role": st.sampled_from(["user", "assistant", "", None]), "content": JSON})
    | st.fixed_dictionaries({"role": st.just("assistant"), "content": SURROGATES})
    | JSON,
    max_size=3,
)


@REUSES
@example(values=[[{"role": "assistant", "content": None}]])
@given(values=st.lists(JSON | SURROGATES | MESSAGES, min_size=1, max_size=6))
def test_any_documents_are_tokens_or_named(encoder: BatchEncoder, values: list) -> None:
    """Every document of a batch gives tokens and one end of text, or is empty, or is named as bad; none is lost."""
    lines = [json.dumps({"text": value}).encode() for value in values]
    places = [f"a.jsonl:{i}" for i in range(len(values))]
    batch = encoder(DocumentBatch(0, "jsonl", lines, places, 0))
    assert len(batch.lengths) + batch.num_empty + len(batch.bad) == len(values)
    assert batch.tokens.size == batch.lengths.sum()
    assert all(text.startswith("a.jsonl:") for text in batch.bad)
    eos = encoder.settings.tokenizer.eos_token_id
    ends = np.cumsum(batch.lengths) - 1
    assert (batch.tokens[ends] == eos).all()
    if not encoder.settings.messages:
        assert np.count_nonzero(batch.tokens == eos) == len(batch.lengths)


class Numbered:
    """So many instances; only their number matters."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count


@settings(max_examples=80, deadline=None)
@given(
    count=st.integers(1, 200),
    batch=st.integers(1, 50),
    epoch=st.integers(0, 3),
    begin=st.integers(0, 250),
    seed=st.integers(0, 2**62),
    order=st.sampled_from(["shuffle", "permutation", "random_offsets"]),
    offsets=st.lists(st.integers(0, 2_000), min_size=1, max_size=20),
)
def test_any_start_of_any_order(
    count: int, batch: int, epoch: int, begin: int, seed: int, order: str, offsets: list[int]
) -> None:
    try:
        data = OrderedDataset(
            Numbered(count),  # type: ignore[arg-type]
            seed=seed,
            shuffle=True,
            global_batch_size=batch,
            start=DataPosition(epoch, begin),
            order=order,  # type: ignore[arg-type]
        )
    except DataError:
        assert order != "random_offsets"
        assert batch > count or begin > count
        return
    ids = data.instance_ids(0, 2_001)
    assert ids.min() >= 0
    assert ids.max() < count
    places = [data.position(offset) for offset in offsets]
    found = [int(data._ids(place.epoch, np.array([place.instances]))[0]) for place in places]
    assert found == ids[offsets].tolist()
