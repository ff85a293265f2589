"""What can be known to be wrong with the data before the first step.

Shapes: `S` tokens of an instance, `T` tokens of a stretch of a file.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from olmo_hf.data.args import DataArgs
from olmo_hf.data.manifest import MANIFEST_NAME, Manifest, ManifestFile, file_sha256, read_manifest
from olmo_hf.data.mixes import read_mix
from olmo_hf.data.mixing import MixedSource, plan_mix
from olmo_hf.data.remote import fetch, is_remote
from olmo_hf.data.token_checks import HEAD_TOKENS, TokenLimits, content_problems
from olmo_hf.data.token_files import (
    TOKEN_DTYPES,
    TokenFile,
    TokenReader,
    expand_paths,
    num_instances,
    open_token_files,
    token_dtype,
)
from olmo_hf.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedFiles:
    """Token files by name, before any is opened.

    Attributes:
        paths: Token files, those of a mix source by source.
        label_mask_paths: Their label masks, or none.
        token_dtype: Type of a token.
        source_sizes: Number of files of each source of a mix; empty without a mix.
    """

    paths: list[str]
    label_mask_paths: list[str]
    token_dtype: str
    source_sizes: dict[str, int]


def manifest_beside(path: str) -> Manifest | None:
    """The manifest in the folder of a local token file."""
    if is_remote(path):
        return None
    folder = os.path.dirname(path) or "."
    try:
        status = os.stat(os.path.join(folder, MANIFEST_NAME))
    except OSError:
        return None
    return _read_manifest_once(folder, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=64)
def _read_manifest_once(folder: str, mtime_ns: int, size_bytes: int) -> Manifest | None:
    """A folder's manifest, read once as long as it does not change: thousands of files share one."""
    return read_manifest(folder)


def resolve_files(args: DataArgs) -> ResolvedFiles:
    """Expands globs and named mixes and finds the token type.

    Raises:
        DataError: Nothing is listed, a glob matches nothing, or the type is neither set nor recorded.
    """
    given = [name for name in ("paths", "mix", "sources") if getattr(args, name)]
    if len(given) > 1:
        raise DataError(f"data.{given[0]}: is set beside data.{given[1]}; remove one of them")
    if args.mix_base is not None and args.mix is None:
        raise DataError("data.mix_base: is set without data.mix; name the mix, or remove it")
    mix = None if args.mix is None else read_mix(args.mix)
    by_source = {name: expand_paths(args.sources[name].paths) for name in sorted(args.sources)}
    listed = [path for found in by_source.values() for path in found] if by_source else expand_paths(args.paths)
    if mix is not None:
        listed = mix.paths(args.mix_base)
    paths = _local(listed, args.cache_dir)
    if not paths:
        raise DataError("data.paths: is empty; list token files or globs such as data/train/*.npy")
    dtype: str | None = args.token_dtype
    if dtype is None and mix is not None:
        dtype = mix.token_dtype
    if dtype is None:
        found = {manifest.token_dtype for path in paths if (manifest := manifest_beside(path)) is not None}
        if len(found) != 1:
            said = "no manifest.json beside the files says it" if not found else f"manifests say {sorted(found)}"
            raise DataError(f"data.token_dtype: is not set and {said}; set it to one of {', '.join(TOKEN_DTYPES)}")
        dtype = found.pop()
    token_dtype(dtype)
    sections = [args.sources[name] for name in by_source] if by_source else [args]
    masks = [path for section in sections for path in expand_paths(section.label_mask_paths)]
    sizes = {name: len(found) for name, found in by_source.items()}
    return ResolvedFiles(paths, _local(masks, args.cache_dir), dtype, sizes)


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
    and some spots of up to a hundred files, `full` every token, and compares checksums with the manifest; `none` reads
    no ids. What is odd but may be meant is logged as a warning.

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
    found, unreadable = open_token_files(files.paths, token_dtype(files.token_dtype))
    problems += unreadable
    opened = list(found.values())
    for file in opened:
        problems += _size_problems(file, args.sequence_length)
        problems += _manifest_problems(file, files.token_dtype, limits.eos_token_id, args.check == "full")
    problems += _mask_problems(files, opened)
    if args.check != "none":
        problems += content_problems(opened, limits, full=args.check == "full")
    return problems if problems else _amount_problems(args, files, opened, global_batch_size)


def _amount_problems(
    args: DataArgs, files: ResolvedFiles, opened: Sequence[TokenFile], global_batch_size: int | None
) -> list[str]:
    """Whether there are enough instances, and of a mix enough of each source."""
    # Draws with replacement can fill any batch.
    endless = args.order == "random_offsets"
    stride = 1 if endless else args.sequence_length
    counts = {file.path: num_instances(file.num_tokens, args.sequence_length, stride) for file in opened}
    instances = sum(counts[path] for path in files.paths)
    if files.source_sizes:
        try:
            instances = sum(source.taken for source in mix_of(args, files, [counts[path] for path in files.paths]))
        except DataError as error:
            return [str(error)]
    needed = 1 if global_batch_size is None or endless else global_batch_size
    if instances >= needed:
        return []
    return [
        f"data.paths: {instances:,} instances of {args.sequence_length:,} tokens, fewer than one global batch of "
        f"{needed:,}; lower training.global_train_batch_size or data.sequence_length, or add data"
    ]


def mix_of(args: DataArgs, files: ResolvedFiles, instances_per_file: Sequence[int]) -> list[MixedSource]:
    """The mix that a section asks for.

    Args:
        args: The section.
        files: Its files.
        instances_per_file: Instances in each of `files.paths`.
    """
    available, first = {}, 0
    for name, size in files.source_sizes.items():
        available[name] = sum(instances_per_file[first : first + size])
        first += size
    return plan_mix(args.sources, available, sequence_length=args.sequence_length, mix_tokens=args.mix_tokens)


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
    return manifest.file(os.path.basename(path))


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
    masks, problems = open_token_files(files.label_mask_paths, np.dtype(np.bool_))
    for path, mask_path in zip(files.paths, files.label_mask_paths, strict=True):
        if mask_path not in masks:
            continue
        mask = masks[mask_path]
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
