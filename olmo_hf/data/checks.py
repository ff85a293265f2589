"""What can be known to be wrong with the data before the first step.

Shapes: `S` tokens of an instance, `T` tokens of a stretch of a file.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from olmo_hf.data.args import DataArgs
from olmo_hf.data.manifest import Manifest, ManifestFile, file_sha256, read_manifest
from olmo_hf.data.remote import fetch, is_remote
from olmo_hf.data.token_files import (
    TOKEN_DTYPES,
    TokenFile,
    TokenReader,
    expand_paths,
    num_instances,
    open_token_file,
    token_dtype,
)
from olmo_hf.errors import DataError

logger = logging.getLogger(__name__)

HEAD_TOKENS = 1_000_000
"""Tokens at the beginning of a file that a quick check reads."""

SPOT_TOKENS = 4_096
"""Tokens of each further spot."""

NUM_SPOTS = 8
"""Further spots, evenly spread, the last at the very end."""

MAX_QUICK_FILES = 100
"""Files a quick check reads, evenly spread over the list; sizes are checked of all."""

FULL_STRETCH_TOKENS = 2**22
"""Tokens a full check reads at a time."""

MIN_LIKELY_WRAP = 8
"""Fewer tokens say nothing about their type."""


@dataclass(frozen=True)
class TokenLimits:
    """What ids are allowed to be.

    Attributes:
        vocab_size: Rows of the model's embedding. None: not known.
        tokenizer_size: Size of the tokenizer. None: not known.
        eos_token_id: Ends a document. None: not known.
    """

    vocab_size: int | None = None
    tokenizer_size: int | None = None
    eos_token_id: int | None = None

    @property
    def largest(self) -> int | None:
        """First id that is too large, or None when nothing is known."""
        known = [size for size in (self.vocab_size, self.tokenizer_size) if size is not None]
        return min(known) if known else None


@dataclass(frozen=True)
class ResolvedFiles:
    """Token files by name, before any is opened."""

    paths: list[str]
    label_mask_paths: list[str]
    token_dtype: str


def manifest_beside(path: str) -> Manifest | None:
    """The manifest in the folder of a local token file."""
    return None if is_remote(path) else read_manifest(os.path.dirname(path) or ".")


def resolve_files(args: DataArgs) -> ResolvedFiles:
    """Expands globs and finds the token type.

    Raises:
        DataError: Nothing is listed, a glob matches nothing, or the type is neither set nor recorded.
    """
    paths = _local(expand_paths(args.paths), args.cache_dir)
    if not paths:
        raise DataError("data.paths: is empty; list token files or globs such as data/train/*.npy")
    dtype: str | None = args.token_dtype
    if dtype is None:
        found = {manifest.token_dtype for path in paths if (manifest := manifest_beside(path)) is not None}
        if len(found) != 1:
            said = "no manifest.json beside the files says it" if not found else f"manifests say {sorted(found)}"
            raise DataError(f"data.token_dtype: is not set and {said}; set it to one of {', '.join(TOKEN_DTYPES)}")
        dtype = found.pop()
    token_dtype(dtype)
    return ResolvedFiles(paths, _local(expand_paths(args.label_mask_paths), args.cache_dir), dtype)


def _local(paths: list[str], cache_dir: str | None) -> list[str]:
    """Paths to read from: remote ones are copied here when there is a directory for it."""
    if cache_dir is None:
        return paths
    return [fetch(path, cache_dir) if is_remote(path) else path for path in paths]


def check_data(
    args: DataArgs,
    *,
    limits: TokenLimits,
    global_batch_size: int | None = None,
) -> list[str]:
    """All problems of a data section that can be found without training.

    Sizes and manifests are checked of every file. Ids are read where `args.check` says: `quick` reads the beginning
    and some spots of up to a hundred files, `full` every token, and compares checksums with the manifest. What is
    odd but may be meant is logged as a warning.

    Args:
        args: The section.
        limits: What the model and the tokenizer allow.
        global_batch_size: Instances of an optimizer step. None: any number of instances will do, but one is needed.
    """
    try:
        files = resolve_files(args)
    except DataError as error:
        return [str(error)]
    problems = _type_problems(files.token_dtype, limits)
    opened: list[TokenFile] = []
    for path in dict.fromkeys(files.paths):
        try:
            file = open_token_file(path, token_dtype(files.token_dtype))
        except DataError as error:
            problems.append(str(error))
            continue
        opened.append(file)
        problems += _size_problems(file, args.sequence_length)
        problems += _manifest_problems(file, files.token_dtype, limits.eos_token_id, args.check == "full")
    problems += _mask_problems(files, opened)
    problems += _content_problems(opened, limits, full=args.check == "full")
    if not problems:
        # Draws with replacement can fill any batch.
        stride = 1 if args.order == "random_offsets" else args.sequence_length
        counts = {file.path: num_instances(file.num_tokens, args.sequence_length, stride) for file in opened}
        instances = sum(counts[path] for path in files.paths)
        needed = 1 if global_batch_size is None or args.order == "random_offsets" else global_batch_size
        if instances < needed:
            problems.append(
                f"data.paths: {instances:,} instances of {args.sequence_length:,} tokens, fewer than one global batch "
                f"of {needed:,}; lower training.global_train_batch_size or data.sequence_length, or add data"
            )
    return problems


def _type_problems(dtype: str, limits: TokenLimits) -> list[str]:
    sizes = [s for s in (limits.tokenizer_size, limits.vocab_size) if s is not None]
    if sizes and sizes[0] - 1 > TOKEN_DTYPES[dtype]:
        return [
            f"data.token_dtype: {dtype} holds ids up to {TOKEN_DTYPES[dtype]:,}, but the vocabulary has {sizes[0]:,}; "
            "the files were made for another vocabulary, or their type is uint32"
        ]
    return []


def _size_problems(file: TokenFile, sequence_length: int) -> list[str]:
    if file.num_tokens == 0:
        return [f"{file.path}: is empty; remove it from data.paths or prepare it again"]
    if file.num_tokens < sequence_length:
        text = f"{file.path}: {file.num_tokens:,} tokens are shorter than one instance of {sequence_length:,}"
        # The last file of a prepared folder may be short; that is no sign of damage.
        if _recorded(file.path) is None:
            return [f"{text}; remove it from data.paths or lower data.sequence_length"]
        logger.warning("%s; none of it is used", text)
    return []


def _recorded(path: str) -> ManifestFile | None:
    """What the manifest beside a file says of it."""
    manifest = manifest_beside(path)
    if manifest is None:
        return None
    return next((file for file in manifest.files if file.path == os.path.basename(path)), None)


def _manifest_problems(file: TokenFile, dtype: str, eos_token_id: int | None, full: bool) -> list[str]:
    try:
        manifest = manifest_beside(file.path)
    except DataError as error:
        return [str(error)]
    if manifest is None:
        return []
    problems = []
    if manifest.token_dtype != dtype:
        problems.append(
            f"{file.path}: the manifest beside it says {manifest.token_dtype}, data.token_dtype says {dtype}; "
            "remove data.token_dtype"
        )
    if eos_token_id is not None and manifest.eos_token_id != eos_token_id:
        problems.append(
            f"{file.path}: its documents end with id {manifest.eos_token_id} (manifest), the model's end of text is "
            f"{eos_token_id}; use the tokenizer the data were made with ({manifest.tokenizer})"
        )
    recorded = _recorded(file.path)
    if recorded is None:
        logger.warning("%s: the manifest beside it does not list it", file.path)
    elif recorded.size_bytes != file.size_bytes:
        problems.append(
            f"{file.path}: {file.size_bytes:,} bytes, the manifest says {recorded.size_bytes:,}; prepare it again"
        )
    elif full and file_sha256(file.path) != recorded.sha256:
        problems.append(f"{file.path}: its checksum is not the manifest's; it was changed. Prepare it again")
    return problems


def _mask_problems(files: ResolvedFiles, opened: Sequence[TokenFile]) -> list[str]:
    if not files.label_mask_paths:
        return []
    if len(files.label_mask_paths) != len(files.paths):
        return [
            f"data.label_mask_paths: {len(files.label_mask_paths)} files for {len(files.paths)} token files; expected "
            "one for each, in order"
        ]
    by_path = {file.path: file for file in opened}
    problems = []
    for path, mask_path in zip(files.paths, files.label_mask_paths, strict=True):
        try:
            mask = open_token_file(mask_path, np.dtype(np.bool_))
        except DataError as error:
            problems.append(str(error))
            continue
        if path in by_path and mask.num_tokens != by_path[path].num_tokens:
            problems.append(
                f"{mask_path}: {mask.num_tokens:,} label flags for the {by_path[path].num_tokens:,} tokens of {path}; "
                "expected one byte per token"
            )
            continue
        head = TokenReader().read(mask, 0, min(HEAD_TOKENS, mask.num_tokens)).view(np.uint8)
        if head.size and head.max() > 1:
            problems.append(f"{mask_path}: holds the byte {head.max()}, expected label flags of 0 or 1")
    return problems


def _content_problems(opened: Sequence[TokenFile], limits: TokenLimits, *, full: bool) -> list[str]:
    chosen = list(opened)
    if not full and len(chosen) > MAX_QUICK_FILES:
        chosen = [opened[i * (len(opened) - 1) // (MAX_QUICK_FILES - 1)] for i in range(MAX_QUICK_FILES)]
    reader = TokenReader()
    problems = []
    for file in chosen:
        try:
            problems += check_tokens(file, reader, limits, full=full)
        except DataError as error:
            problems.append(str(error))
    return problems


def _stretches(file: TokenFile, full: bool) -> Iterator[tuple[int, int]]:
    """First token and length of what a check reads of a file."""
    if full:
        for first in range(0, file.num_tokens, FULL_STRETCH_TOKENS):
            yield first, min(FULL_STRETCH_TOKENS, file.num_tokens - first)
        return
    head = min(HEAD_TOKENS, file.num_tokens)
    yield 0, head
    if file.num_tokens > head:
        for spot in range(1, NUM_SPOTS + 1):
            length = min(SPOT_TOKENS, file.num_tokens - head)
            yield head + (file.num_tokens - head - length) * spot // NUM_SPOTS, length


def check_tokens(file: TokenFile, reader: TokenReader, limits: TokenLimits, *, full: bool) -> list[str]:
    """Problems of the ids in one file: too large, or of another type than they are read as."""
    limit, has_eos = limits.largest, False
    for first, length in _stretches(file, full):
        tokens = reader.read(file, first, length)  # (T,)
        if first == 0 and looks_wider(tokens, limit):
            return [
                f"{file.path}: every second {file.dtype} token is 0 or nearly so, as when a file of "
                f"uint{16 * file.dtype.itemsize} is read as {file.dtype}; correct data.token_dtype"
            ]
        if limit is not None and tokens.size and int(tokens.max()) >= limit:
            place = int(np.argmax(tokens >= limit))
            text = _too_large(file, first + place, int(tokens[place]), limits)
            return [text + _narrower_hint(tokens, limit)]
        if limits.eos_token_id is not None and first < HEAD_TOKENS:
            has_eos = has_eos or bool((tokens == limits.eos_token_id).any())
    if limits.eos_token_id is not None and not has_eos and file.num_tokens:
        logger.warning(
            "%s: no end-of-text id %d among the first %s tokens; was it made with another tokenizer?",
            file.path,
            limits.eos_token_id,
            f"{min(HEAD_TOKENS, file.num_tokens):,}",
        )
    return []


def _too_large(file: TokenFile, place: int, token: int, limits: TokenLimits) -> str:
    if limits.vocab_size is not None and token >= limits.vocab_size:
        allowed = f"the model's vocabulary has {limits.vocab_size:,}"
    else:
        allowed = f"the tokenizer has {limits.tokenizer_size:,}"
    return f"{file.path}: token {place:,} is id {token:,}, but {allowed}; use the tokenizer the data were made with"


def _narrower_hint(tokens: np.ndarray, limit: int) -> str:
    """Says so when the bytes make good sense as tokens of half the size."""
    if tokens.dtype.itemsize < 4:
        return ""
    narrower = np.dtype(f"<u{tokens.dtype.itemsize // 2}")
    return f" (read as {narrower} every id fits: set data.token_dtype)" if tokens.view(narrower).max() < limit else ""


def looks_wider(tokens: np.ndarray, limit: int | None) -> bool:
    """Whether tokens look like the halves of tokens twice as wide: low half, high half, low half, ...

    The high halves of real ids are tiny (0 or 1 for a vocabulary of 100,000), while the low ones are spread.

    Args:
        tokens: Beginning of a file, shape (T,).
        limit: Size of the vocabulary, if known.
    """
    if tokens.dtype.itemsize > 4 or tokens.size < MIN_LIKELY_WRAP:
        return False
    low, high = tokens[0::2], tokens[1::2]
    # What the high half of an id can be; 3 allows for vocabularies up to 262,144 when nothing is known.
    most = 3 if limit is None else max((limit - 1) >> (8 * tokens.dtype.itemsize), 3)
    if int(high.max()) <= most and np.unique(low).size > 4 * (most + 1):
        return True
    # High halves all zero and low ones not: this also tells for a handful of tokens.
    return not bool(high.any()) and int(np.count_nonzero(low)) >= max(low.size - 1, MIN_LIKELY_WRAP // 2)
