"""What the ids in a token file tell about whether it is what it is said to be.

Shapes: `T` tokens of a stretch of a file.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from olmo_hf.data.token_files import TokenFile, TokenReader
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


def content_problems(opened: Sequence[TokenFile], limits: TokenLimits, *, full: bool) -> list[str]:
    """Problems of the ids in all files. A quick check reads only some of very many files."""
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
