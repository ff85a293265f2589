"""Token files as one sequence of instances of fixed length.

Shapes: `S` tokens of an instance, `B` instances of a fetch, `D` documents in an instance.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from olmo_hf.data.args import InstanceFilterArgs
from olmo_hf.data.documents import document_lengths
from olmo_hf.data.filters import keep_instance
from olmo_hf.data.instance_batch import InstanceBatch
from olmo_hf.data.token_files import TokenFile, TokenReader, num_instances, open_token_files
from olmo_hf.data.token_files import token_dtype as dtype_of
from olmo_hf.errors import DataError

TORCH_DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
"""Type of a tensor by the bytes of a token on disk."""


class InstanceLocation(NamedTuple):
    """Where an instance lies."""

    path: str
    file_index: int
    offset_tokens: int


class MemMapDataset(Dataset[dict[str, Any]]):
    """Instances of `sequence_length` tokens cut from token files, in the order of `paths`.

    The tail of every file that is shorter than an instance is dropped, instances never cross files, and a path
    listed twice counts twice (spec: data.md section 3). Little is held in memory but a few numbers per file; files
    are opened when first read, in whichever process reads, so the dataset pickles as a list of paths.

    Items are dictionaries with `input_ids` (int64, (S,)) and, where asked for, `instance_mask` (bool, True is
    trained on), `label_mask` (bool, (S,)), `metadata`, `attention_mask` (int64, (S,)), `doc_lens` (int32, (D,)).

    Args:
        paths: Token files.
        sequence_length: Tokens per instance.
        token_dtype: Type of a token on disk: uint8, uint16, uint32 or uint64.
        label_mask_paths: One file of booleans (one byte per token) for each token file.
        eos_token_id: Ends a document; needed by `generate_doc_lens`.
        pad_token_id: Needed by `generate_attention_mask`.
        instance_filter: Limits of the repetition filter. None: no filter.
        generate_doc_lens: Items carry the lengths of their documents.
        generate_attention_mask: Items carry a mask that is 0 at pad tokens.
        metadata: One dictionary for all files, or one per file. None: items carry none.
        instance_stride_tokens: Distance between the beginnings of two instances. None: `sequence_length`; 1 makes
            every token the beginning of one.
        known: What is known of some files already, by path; these are not looked at again.

    Raises:
        DataError: A file cannot be used; all problems are in the message.
    """

    def __init__(
        self,
        paths: Sequence[str],
        *,
        sequence_length: int,
        token_dtype: str,
        label_mask_paths: Sequence[str] | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int | None = None,
        instance_filter: InstanceFilterArgs | None = None,
        generate_doc_lens: bool = False,
        generate_attention_mask: bool = False,
        metadata: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        instance_stride_tokens: int | None = None,
        known: Mapping[str, TokenFile] | None = None,
    ):
        if sequence_length < 1:
            raise DataError(f"sequence_length: found {sequence_length}, expected 1 or more")
        if generate_doc_lens and eos_token_id is None:
            raise DataError(
                "eos_token_id: is not given, but document lengths are asked for; take a tokenizer with one"
            )
        if generate_attention_mask and pad_token_id is None:
            raise DataError(
                "pad_token_id: is not given, but an attention mask is asked for; take a tokenizer with one"
            )
        self.paths = [str(path) for path in paths]
        self.sequence_length = sequence_length
        self.token_dtype = token_dtype
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.instance_filter = instance_filter
        self.generate_doc_lens = generate_doc_lens
        self.generate_attention_mask = generate_attention_mask
        self._metadata = _metadata_per_file(metadata, len(self.paths))
        known = {} if known is None else known
        self._files = _open_all(self.paths, dtype_of(token_dtype), known)
        self._masks = _open_masks(label_mask_paths, self._files, known)
        self.instance_stride_tokens = sequence_length if instance_stride_tokens is None else instance_stride_tokens
        counts = [num_instances(file.num_tokens, sequence_length, self.instance_stride_tokens) for file in self._files]
        self._first_instance = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])  # (files + 1,)
        self._reader = TokenReader()

    def __len__(self) -> int:
        return int(self._first_instance[-1])

    @property
    def file_offsets(self) -> list[tuple[int, int]]:
        """First instance of each file, and the one behind its last."""
        return list(itertools.pairwise(self._first_instance.tolist()))

    def locate(self, index: int) -> InstanceLocation:
        """File and place of an instance.

        Raises:
            IndexError: There is no such instance.
        """
        (file_index,), (offset_tokens,) = self._locate([index])
        return InstanceLocation(self.paths[file_index], file_index, offset_tokens)

    def _locate(self, indices: Sequence[int] | np.ndarray) -> tuple[list[int], list[int]]:
        """Number of the file, and first token in it, of every instance."""
        ids = np.asarray(indices, dtype=np.int64)  # (B,)
        outside = (ids < -len(self)) | (ids >= len(self))
        if outside.any():
            raise IndexError(f"instance {ids[outside][0]} of {len(self)}")
        ids = np.where(ids < 0, ids + len(self), ids)
        files = np.searchsorted(self._first_instance, ids, side="right") - 1  # (B,)
        offsets = (ids - self._first_instance[files]) * self.instance_stride_tokens  # (B,)
        return files.tolist(), offsets.tolist()

    def __getitem__(self, index: int) -> dict[str, Any]:
        item: dict[str, Any] = self.__getitems__([index])[0]
        return item

    def __getitems__(self, indices: Sequence[int] | np.ndarray) -> InstanceBatch:
        """Many instances at once: a sequence of items, which a collator can also take whole."""
        files, offsets = self._locate(indices)
        tokens = self._rows(self._files, files, offsets)  # (B, S)
        columns: dict[str, Any] = {}
        if self._masks is not None:
            columns["label_mask"] = self._rows(self._masks, files, offsets) != 0  # (B, S)
        rows = tokens.numpy()
        if self.instance_filter is not None:
            columns["instance_mask"] = [keep_instance(row, self.instance_filter) for row in rows]
        if self._metadata is not None:
            # A copy: whoever changes an item must not change the data set.
            columns["metadata"] = [copy.deepcopy(self._metadata[file_index]) for file_index in files]
        if self.generate_attention_mask:
            assert self.pad_token_id is not None
            columns["attention_mask"] = tokens.to(torch.int64).ne(self.pad_token_id).long()  # (B, S)
        if self.generate_doc_lens:
            assert self.eos_token_id is not None
            lengths = [document_lengths(row, self.eos_token_id) for row in rows]
            columns["doc_lens"] = [torch.from_numpy(row) for row in lengths]  # B of (D,)
        return InstanceBatch(tokens, columns)

    def _rows(self, sources: Sequence[TokenFile], files: list[int], offsets: list[int]) -> torch.Tensor:
        """One stretch of a file per row, in the type of the files, (B, S)."""
        dtype = TORCH_DTYPES[sources[0].dtype.itemsize]
        rows = torch.empty(len(files), self.sequence_length, dtype=dtype)
        target, read = rows.numpy(), self._reader.read_into
        for row, file_index, offset in zip(target, files, offsets, strict=True):
            read(sources[file_index], offset, row)
        return rows


def _metadata_per_file(
    metadata: dict[str, Any] | Sequence[dict[str, Any]] | None, num_files: int
) -> list[dict[str, Any]] | None:
    if metadata is None:
        return None
    if isinstance(metadata, dict):
        return [metadata] * num_files
    if len(metadata) != num_files:
        raise DataError(f"{len(metadata)} metadata for {num_files} token files; expected one each")
    return list(metadata)


def _open_all(paths: Sequence[str], dtype: np.dtype, known: Mapping[str, TokenFile]) -> list[TokenFile]:
    """Opens every file and raises once, with all problems."""
    found, problems = open_token_files([path for path in paths if path not in known], dtype)
    if problems:
        raise DataError("\n".join(problems))
    return [known[path] if path in known else found[path] for path in paths]


def _open_masks(
    paths: Sequence[str] | None, files: Sequence[TokenFile], known: Mapping[str, TokenFile]
) -> list[TokenFile] | None:
    """Opens label masks. Token counts must agree exactly: a shifted mask would train on the wrong tokens."""
    if not paths:
        return None
    if len(paths) != len(files):
        raise DataError(
            f"data.label_mask_paths: {len(paths)} files for {len(files)} token files; expected one for each, in order"
        )
    masks = _open_all(paths, np.dtype(np.bool_), known)
    problems = [
        f"{mask.path}: {mask.num_tokens:,} label flags for the {file.num_tokens:,} tokens of {file.path}; "
        "expected one byte per token"
        for mask, file in zip(masks, files, strict=True)
        if mask.num_tokens != file.num_tokens
    ]
    if problems:
        raise DataError("\n".join(problems))
    return masks
