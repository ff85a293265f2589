"""A full check of prepared token files, and of token files from elsewhere."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from olmo_hf.data.manifest import Manifest, ManifestFile, file_sha256, read_manifest
from olmo_hf.data.token_checks import FULL_STRETCH_TOKENS, TokenLimits, check_tokens
from olmo_hf.data.token_files import TokenFile, TokenReader, open_token_file, token_dtype
from olmo_hf.errors import DataError


@dataclass(frozen=True)
class FileFacts:
    """What a token file holds.

    Attributes:
        path: The file.
        num_tokens: Tokens.
        num_documents: End-of-text tokens, and one more for an end without one. None: the id is not known.
        largest_token: Largest id.
    """

    path: str
    num_tokens: int
    num_documents: int | None
    largest_token: int


def verify_prepared(folder: str) -> tuple[list[FileFacts], list[str]]:
    """Reads every token of a prepared directory, or of one split of it, and compares with the manifest.

    Returns:
        What was found in each file, and all problems.

    Raises:
        DataError: There is no manifest.
    """
    splits = [p for p in (folder, *_subfolders(folder)) if read_manifest(p) is not None]
    if not splits:
        raise DataError(f"{folder}: holds no manifest.json; name token files themselves, with --token-dtype")
    facts, problems = [], []
    for split in splits:
        manifest = read_manifest(split)
        assert manifest is not None
        problems += _tokenizer_problems(split, manifest)
        listed = {file.path for file in manifest.files}
        problems += [
            f"{path}: is not in the manifest beside it" for path in _token_files(split) if path.name not in listed
        ]
        for file in manifest.files:
            found, wrong = _verify_recorded(split, file, manifest)
            facts += found
            problems += wrong
    return facts, problems


def verify_files(
    paths: list[str], *, dtype: str, vocab_size: int | None, eos_token_id: int | None
) -> tuple[list[FileFacts], list[str]]:
    """Reads every token of some files that have no manifest, such as those of the original."""
    limits = TokenLimits(vocab_size=vocab_size, eos_token_id=eos_token_id)
    facts, problems, reader = [], [], TokenReader()
    for path in paths:
        try:
            file = open_token_file(path, token_dtype(dtype))
            problems += check_tokens(file, reader, limits, full=True)
            facts.append(_facts(file, reader, eos_token_id))
        except DataError as error:
            problems.append(str(error))
    return facts, problems


def _subfolders(folder: str) -> list[str]:
    return sorted(entry.path for entry in os.scandir(folder) if entry.is_dir())


def _token_files(folder: str) -> list[Path]:
    return sorted(Path(folder).glob("*.npy"))


def _tokenizer_problems(split: str, manifest: Manifest) -> list[str]:
    path = Path(split) / manifest.tokenizer / "tokenizer.json"
    if not path.is_file():
        return [f"{split}: the tokenizer that its manifest names is missing ({path})"]
    if file_sha256(path) != manifest.tokenizer_sha256:
        return [f"{path}: is not the tokenizer the tokens were made with; its checksum differs from the manifest"]
    return []


def _verify_recorded(split: str, recorded: ManifestFile, manifest: Manifest) -> tuple[list[FileFacts], list[str]]:
    path = os.path.join(split, recorded.path)
    reader = TokenReader()
    try:
        file = open_token_file(path, token_dtype(manifest.token_dtype))
        facts = _facts(file, reader, manifest.eos_token_id)
        problems = check_tokens(file, reader, TokenLimits(tokenizer_size=manifest.vocab_size), full=True)
        last = reader.read(file, file.num_tokens - 1, 1) if file.num_tokens else np.empty(0)
    except DataError as error:
        return [], [str(error)]
    expected = (recorded.num_tokens, recorded.num_documents)
    if (facts.num_tokens, facts.num_documents) != expected:
        problems.append(
            f"{path}: {facts.num_tokens:,} tokens in {facts.num_documents:,} documents, the manifest says "
            f"{expected[0]:,} in {expected[1]:,}"
        )
    if last.size and int(last[0]) != manifest.eos_token_id:
        problems.append(f"{path}: ends in the middle of a document (last id {int(last[0])})")
    if file_sha256(path) != recorded.sha256:
        problems.append(f"{path}: its checksum is not the manifest's; it was changed. Prepare it again")
    if recorded.label_mask is not None:
        problems += _mask_problems(os.path.join(split, recorded.label_mask), recorded.num_tokens)
    return [facts], problems


def _mask_problems(path: str, num_tokens: int) -> list[str]:
    try:
        mask = open_token_file(path, np.dtype(np.bool_))
    except DataError as error:
        return [str(error)]
    return [] if mask.num_tokens == num_tokens else [f"{path}: {mask.num_tokens:,} flags for {num_tokens:,} tokens"]


def _facts(file: TokenFile, reader: TokenReader, eos_token_id: int | None) -> FileFacts:
    largest, documents, last_is_eos = 0, 0, True
    for tokens in _pieces(file, reader):
        largest = max(largest, int(tokens.max()))
        if eos_token_id is not None:
            documents += int(np.count_nonzero(tokens == eos_token_id))
            last_is_eos = int(tokens[-1]) == eos_token_id
    counted = None if eos_token_id is None else documents + (0 if last_is_eos else 1)
    return FileFacts(file.path, file.num_tokens, counted, largest)


def _pieces(file: TokenFile, reader: TokenReader) -> Iterator[np.ndarray]:
    for first in range(0, file.num_tokens, FULL_STRETCH_TOKENS):
        yield reader.read(file, first, min(FULL_STRETCH_TOKENS, file.num_tokens - first))
