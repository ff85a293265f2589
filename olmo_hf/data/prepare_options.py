"""What a preparation is asked to do."""

import hashlib
import json
from dataclasses import asdict, dataclass, replace

from olmo_hf.data.document_sources import SourceFile
from olmo_hf.data.token_files import TOKEN_DTYPES
from olmo_hf.errors import DataError


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What to prepare.

    Everything but `output`, `num_workers`, `max_bad_documents` and `state_interval_seconds` decides the result.
    """

    output: str
    """Directory of the result."""

    sources: tuple[str, ...] = ()
    """Files and directories of text, JSON lines or Parquet."""

    dataset: str | None = None
    """Instead of `sources`: name or directory for `datasets.load_dataset` or `load_from_disk`."""

    dataset_split: str = "train"
    """Split of `dataset`."""

    text_column: str = "text"
    """Field that holds the text."""

    messages_column: str | None = None
    """Field that holds conversations. Given: tokens get label flags, and `text_column` is not read."""

    patterns: tuple[str, ...] = ()
    """What to take of a source directory."""

    exclude: tuple[str, ...] = ()
    """What to leave out of it."""

    tokenizer: str | None = None
    """Directory, `tokenizer.json` or hub name of a tokenizer."""

    train_tokenizer: int | None = None
    """Instead of `tokenizer`: train one on the training split, of this many entries and two special tokens."""

    tokenizer_training_bytes: int = 200_000_000
    """Text a tokenizer is trained on: the first so many bytes."""

    eos_token: str | None = None
    """Which token of `tokenizer` ends a document, if it does not say so itself."""

    token_dtype: str = "auto"
    """Type of a token on disk. `auto`: the smallest of uint16 and uint32 that holds every id."""

    validation_fraction: float = 0.05
    """Share of the documents, chosen by the hash of their text, that goes to the validation split."""

    max_tokens_per_file: int = 2**29
    """Size of a token file; only a single longer document makes a longer one."""

    max_documents: int | None = None
    """Take only the first so many documents. None: all."""

    max_bad_documents: int = 100
    """Give up when more documents than this cannot be read."""

    num_workers: int = 0
    """Processes that encode. 0: this one, in which the tokenizer uses all cores."""

    state_interval_seconds: float = 30.0
    """Time between two records of the state; at most so much work is done again after a kill."""

    @property
    def column(self) -> str:
        """The field that is read."""
        return self.text_column if self.messages_column is None else self.messages_column


def choose_dtype(name: str, vocab_size: int) -> str:
    """The type of a token on disk.

    Raises:
        DataError: The type is unknown or cannot hold every id.
    """
    if name == "auto":
        return "uint16" if vocab_size - 1 <= TOKEN_DTYPES["uint16"] else "uint32"
    if name not in TOKEN_DTYPES:
        raise DataError(f"--token-dtype: found {name!r}, expected auto or one of {', '.join(TOKEN_DTYPES)}")
    if vocab_size - 1 > TOKEN_DTYPES[name]:
        raise DataError(
            f"--token-dtype: {name} holds ids up to {TOKEN_DTYPES[name]:,}, but the tokenizer has {vocab_size:,}; "
            "use auto"
        )
    return name


def check_options(options: PrepareOptions) -> None:
    """Refuses what contradicts itself.

    Raises:
        DataError: All problems at once.
    """
    problems = []
    if bool(options.sources) == (options.dataset is not None):
        problems.append("give either source paths or --dataset, not both and not neither")
    if (options.tokenizer is None) == (options.train_tokenizer is None):
        problems.append("give either --tokenizer or --train-tokenizer, not both and not neither")
    if options.train_tokenizer is not None and options.messages_column is not None:
        problems.append("--messages-column: needs a finished tokenizer; give --tokenizer")
    if not 0 <= options.validation_fraction < 1:
        problems.append(f"--validation-fraction: found {options.validation_fraction}, expected 0 or more and below 1")
    if options.max_tokens_per_file < 1:
        problems.append(f"--max-tokens-per-file: found {options.max_tokens_per_file}, expected 1 or more")
    if options.max_documents is not None and options.max_documents < 1:
        problems.append(f"--max-documents: found {options.max_documents}, expected 1 or more")
    if options.max_bad_documents < 0:
        problems.append(f"--max-bad-documents: found {options.max_bad_documents}, expected 0 or more")
    if options.num_workers < 0:
        problems.append(f"--num-workers: found {options.num_workers}, expected 0 or more")
    if problems:
        raise DataError("\n".join(problems))


def fingerprint_of(options: PrepareOptions, files: list[SourceFile], rows_mark: str | None = None) -> str:
    """Checksum of everything that decides the result, to tell whether a half-done output belongs to it.

    `rows_mark` changes with the content of `dataset`.
    """
    defaults = PrepareOptions(output="")
    # What may change between two launches of one preparation.
    deciding = replace(
        options,
        output="",
        num_workers=defaults.num_workers,
        max_bad_documents=defaults.max_bad_documents,
        state_interval_seconds=defaults.state_interval_seconds,
    )
    marks = [] if rows_mark is None else [rows_mark]
    content = json.dumps([asdict(deciding), [asdict(file) for file in files], *marks], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
