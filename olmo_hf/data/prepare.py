"""Documents in, token files out: `OUTPUT/tokenizer/`, `OUTPUT/train/` and `OUTPUT/validation/`.

Each split holds numbered headerless token files and a `manifest.json` that describes them. The result depends on the
sources and the options alone, not on how many processes worked or how often they were killed: the state of the work
is put on disk at intervals and everything behind it is done again.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from olmo_hf.data.document_sources import (
    BadDocumentError,
    DocumentBatch,
    SourceFile,
    file_batches,
    in_validation,
    list_source_files,
    load_rows,
    read_document,
    row_batches,
)
from olmo_hf.data.encode_documents import EncodedBatch, EncoderSettings, encode_batches
from olmo_hf.data.manifest import Manifest, read_manifest, write_manifest
from olmo_hf.data.prepare_options import PrepareOptions, check_options, choose_dtype, fingerprint_of
from olmo_hf.data.token_writer import SplitWriter
from olmo_hf.data.tokenizer_files import (
    TokenizerFiles,
    read_tokenizer,
    save_tokenizer,
    take_over_tokenizer,
    train_tokenizer,
)
from olmo_hf.errors import DataError

SPLITS = ("train", "validation")

STATE_NAME = ".prepare-state.json"

MAX_REPORTED_BAD = 100
"""Bad documents named one by one; beyond that they are only counted."""


@dataclass
class PrepareReport:
    """What a preparation did.

    Attributes:
        manifests: One per split that has documents.
        num_empty: Documents without text.
        num_bad: Documents that could not be used.
        bad: What was wrong, of the first hundred.
        num_tokens_now: Tokens made by this call (less than all after a restart).
        seconds: Time this call took to encode and write them.
    """

    manifests: dict[str, Manifest]
    num_empty: int = 0
    num_bad: int = 0
    bad: list[str] | None = None
    num_tokens_now: int = 0
    seconds: float = 0.0


ProgressFunction = Callable[[EncodedBatch], None]


def prepare_data(
    options: PrepareOptions, *, on_start: Callable[[int], None] | None = None, on_batch: ProgressFunction | None = None
) -> PrepareReport:
    """Prepares a data set, or continues a preparation that was killed.

    Args:
        options: What to do.
        on_start: Told the size of the sources in bytes (0 if not known) before the work begins.
        on_batch: Told of every batch that was written.

    Raises:
        DataError: Options or sources cannot be used, too many documents are bad, or the output holds something else.
    """
    check_options(options)
    files = (
        []
        if options.dataset
        else list_source_files(options.sources, patterns=options.patterns, exclude=options.exclude)
    )
    try:
        os.makedirs(options.output, exist_ok=True)
        with _alone(options.output):
            return _prepare(options, files, on_start, on_batch)
    except OSError as error:
        raise DataError(
            f"{options.output}: cannot be written ({error.strerror or error}); mend that and run the same command "
            "again, it continues where it was"
        ) from error


@contextmanager
def _alone(output: str) -> Iterator[None]:
    """Keeps a second preparation out of the same directory; the lock ends with its process, however that ends."""
    folder = os.open(output, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{output}: another preparation is writing there; wait for it or choose another") from None
        yield
    finally:
        os.close(folder)


def _prepare(
    options: PrepareOptions,
    files: list[SourceFile],
    on_start: Callable[[int], None] | None,
    on_batch: ProgressFunction | None,
) -> PrepareReport:
    output = Path(options.output)
    mark = None
    if options.dataset is not None:
        mark = load_rows(options.dataset, options.dataset_split, options.column)._fingerprint
    fingerprint = fingerprint_of(options, files, mark)
    state = _read_state(output, fingerprint)
    if state is None:
        finished = _finished(output, fingerprint)
        if finished is not None:
            return PrepareReport(finished)
        tokenizer = _make_tokenizer(options, files)
        state = {"fingerprint": fingerprint, "next_batch": 0, "splits": {}, "num_empty": 0, "num_bad": 0, "bad": []}
    else:
        tokenizer = read_tokenizer(output / "tokenizer")
    work = _Work(options, tokenizer, state)
    if on_start is not None:
        on_start(sum(file.size_bytes for file in files))
    work.run(_batches(options, files), on_batch)
    return work.finish(_describe_sources(options, files))


class _Work:
    """One run of a preparation."""

    def __init__(self, options: PrepareOptions, tokenizer: TokenizerFiles, state: dict[str, Any]):
        self.options = options
        self.tokenizer = tokenizer
        self.state = state
        self.dtype = choose_dtype(options.token_dtype, tokenizer.vocab_size)
        self.output = Path(options.output)
        self.writers = {
            split: SplitWriter(
                self.output / split,
                dtype=self.dtype,
                max_tokens_per_file=options.max_tokens_per_file,
                with_label_mask=options.messages_column is not None,
                state=state["splits"].get(split),
            )
            for split in SPLITS
        }
        self.report = PrepareReport({}, state["num_empty"], state["num_bad"], list(state["bad"]))

    def run(self, batches: Iterator[DocumentBatch], on_batch: ProgressFunction | None) -> None:
        """Encodes and writes what is not yet written."""
        first = self.state["next_batch"]
        settings = EncoderSettings(
            tokenizer=self.tokenizer,
            column=self.options.column,
            messages=self.options.messages_column is not None,
            validation_fraction=self.options.validation_fraction,
        )
        todo = (batch for batch in batches if batch.number >= first)
        # From here on the output is known to be half-done, whenever this ends.
        self._save_state(first)
        began = saved = time.monotonic()
        for encoded in encode_batches(todo, settings, num_workers=self.options.num_workers):
            self._write(encoded)
            self.report.num_tokens_now += encoded.tokens.size
            if on_batch is not None:
                on_batch(encoded)
            if time.monotonic() - saved >= self.options.state_interval_seconds:
                self._save_state(encoded.number + 1)
                saved = time.monotonic()
        self.report.seconds = time.monotonic() - began

    def _write(self, encoded: EncodedBatch) -> None:
        end = 0
        documents = zip(
            encoded.lengths.tolist(), encoded.validation.tolist(), encoded.text_bytes.tolist(), strict=True
        )
        for length, validation, text_bytes in documents:
            begin, end = end, end + length
            mask = None if encoded.label_mask is None else encoded.label_mask[begin:end]
            writer = self.writers["validation" if validation else "train"]
            writer.add(encoded.tokens[begin:end], mask, text_bytes=text_bytes)
        report = self.report
        assert report.bad is not None
        report.num_empty += encoded.num_empty
        report.num_bad += len(encoded.bad)
        report.bad += encoded.bad[: MAX_REPORTED_BAD - len(report.bad)]
        if report.num_bad > self.options.max_bad_documents:
            shown = "\n".join(f"  - {text}" for text in report.bad[:10])
            raise DataError(
                f"{report.num_bad:,} documents cannot be used, more than the {self.options.max_bad_documents:,} "
                f"that --max-bad-documents allows; mend them or raise it. The first are\n{shown}"
            )

    def _save_state(self, next_batch: int) -> None:
        self.state = {
            **self.state,
            "next_batch": next_batch,
            "splits": {split: writer.state() for split, writer in self.writers.items()},
            "num_empty": self.report.num_empty,
            "num_bad": self.report.num_bad,
            "bad": self.report.bad,
        }
        _write_json(self.output / STATE_NAME, self.state)

    def finish(self, sources: tuple[dict[str, Any], ...]) -> PrepareReport:
        """Gives the last files their names and writes the manifests."""
        if not any(writer.num_documents for writer in self.writers.values()):
            shown = "".join(f"\n  - {text}" for text in (self.report.bad or [])[:10])
            raise DataError(f"the sources hold no document with text; check --pattern and --text-column{shown}")
        recorded = {
            name: value
            for name, value in asdict(self.options).items()
            if name
            in ("text_column", "messages_column", "validation_fraction", "max_tokens_per_file", "max_documents")
        }
        for split, writer in self.writers.items():
            files = writer.close()
            if not files:
                continue
            manifest = Manifest(
                token_dtype=self.dtype,
                vocab_size=self.tokenizer.vocab_size,
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.pad_token_id,
                tokenizer="../tokenizer",
                tokenizer_sha256=self.tokenizer.sha256,
                num_documents=writer.num_documents,
                num_tokens=writer.num_tokens,
                files=tuple(files),
                sources=sources,
                settings={**recorded, "split": split, "fingerprint": self.state["fingerprint"]},
            )
            write_manifest(writer.folder, manifest)
            self.report.manifests[split] = manifest
        (self.output / STATE_NAME).unlink(missing_ok=True)
        return self.report


def _read_state(output: Path, fingerprint: str) -> dict[str, Any] | None:
    """The state of a half-done preparation, or None when there is none.

    Raises:
        DataError: It is another preparation.
    """
    path = output / STATE_NAME
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        known = state["fingerprint"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be understood ({error}); remove {output} and start again") from error
    if known != fingerprint:
        raise DataError(
            f"{output}: holds a half-done preparation with other options or of sources that changed since; finish it "
            f"with the same command, or remove {output}"
        )
    return dict(state)


def _finished(output: Path, fingerprint: str) -> dict[str, Manifest] | None:
    """The manifests of this very preparation when it is finished, or None when nothing is there.

    Raises:
        DataError: The output holds other token files.
    """
    found = {split: manifest for split in SPLITS if (manifest := read_manifest(output / split)) is not None}
    if found and all(manifest.settings.get("fingerprint") == fingerprint for manifest in found.values()):
        return found
    for split in SPLITS:
        if split in found or any((output / split).glob("*.npy")):
            raise DataError(f"{output / split}: holds other token files already; choose another --output")
    return None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    hidden = path.with_name(f"{path.name}.tmp")
    with open(hidden, "w", encoding="utf-8") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(hidden, path)


def _make_tokenizer(options: PrepareOptions, files: list[SourceFile]) -> TokenizerFiles:
    folder = Path(options.output) / "tokenizer"
    if options.tokenizer is not None:
        return take_over_tokenizer(options.tokenizer, folder, eos_token=options.eos_token)
    assert options.train_tokenizer is not None
    tokenizer = train_tokenizer(_training_texts(options, files), options.train_tokenizer)
    return save_tokenizer(tokenizer, folder, eos_token="<|endoftext|>", pad_token="<|padding|>")


def _training_texts(options: PrepareOptions, files: list[SourceFile]) -> Iterator[str]:
    """Texts of the training split, so that the validation split stays unseen also by the tokenizer."""
    left = options.tokenizer_training_bytes
    for batch in _batches(options, files):
        for content, place in zip(batch.contents, batch.places, strict=True):
            try:
                text = read_document(batch.kind, content, place, options.column)
            except BadDocumentError:
                continue
            if not isinstance(text, str) or in_validation(text, options.validation_fraction):
                continue
            yield text
            left -= len(text)
            if left <= 0:
                return


def _batches(options: PrepareOptions, files: list[SourceFile]) -> Iterator[DocumentBatch]:
    if options.dataset is None:
        return file_batches(files, column=options.column, max_documents=options.max_documents)
    rows = load_rows(options.dataset, options.dataset_split, options.column)
    return row_batches(rows, column=options.column, max_documents=options.max_documents)


def _describe_sources(options: PrepareOptions, files: list[SourceFile]) -> tuple[dict[str, Any], ...]:
    if options.dataset is not None:
        return ({"dataset": options.dataset, "split": options.dataset_split},)
    described: list[dict[str, Any]] = []
    for source in options.sources:
        own = [f for f in files if f.path == source or f.path.startswith(os.path.join(source, ""))]
        described.append({"path": source, "files": len(own), "size_bytes": sum(f.size_bytes for f in own)})
    return tuple(described)
