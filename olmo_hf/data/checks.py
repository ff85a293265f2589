"""What can be known to be wrong with the data before the first step.

Shapes: `S` tokens of an instance, `T` tokens of a stretch of a file.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from olmo_hf.data.args import DataArgs
from olmo_hf.data.manifest import file_sha256
from olmo_hf.data.manifest_lookup import ask_ahead, manifest_beside, recorded
from olmo_hf.data.mixes import read_mix
from olmo_hf.data.mixing import MixedSource, plan_mix
from olmo_hf.data.path_patterns import expand_paths
from olmo_hf.data.remote import fetch, is_remote, sha256_remote
from olmo_hf.data.token_checks import HEAD_TOKENS, TokenLimits, content_problems
from olmo_hf.data.token_files import (
    TOKEN_DTYPES,
    TokenFile,
    TokenReader,
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
        origins: Where each of `paths` was copied from; its own path where it was not.
    """

    paths: list[str]
    label_mask_paths: list[str]
    token_dtype: str
    source_sizes: dict[str, int]
    origins: list[str]


def resolve_files(args: DataArgs) -> ResolvedFiles:
    """Expands globs and named mixes, finds the token type, and copies remote files if that is asked for.

    Raises:
        DataError: Nothing is listed, a glob matches nothing, or the type is neither set nor recorded.
    """
    return copied_files(list_files(args), args.cache_dir)


def list_files(args: DataArgs) -> ResolvedFiles:
    """Identical to `resolve_files` except that nothing is copied."""
    given = [name for name in ("paths", "mix", "sources") if getattr(args, name)]
    if len(given) > 1:
        raise DataError(f"data.{given[0]}: is set beside data.{given[1]}; remove one of them")
    if args.mix_base is not None and args.mix is None:
        raise DataError("data.mix_base: is set without data.mix; name the mix, or remove it")
    mix = None if args.mix is None else read_mix(args.mix)
    by_source = {name: expand_paths(args.sources[name].paths) for name in sorted(args.sources)}
    paths = [path for found in by_source.values() for path in found] if by_source else expand_paths(args.paths)
    if mix is not None:
        paths = mix.paths(args.mix_base)
    if not paths:
        raise DataError("data.paths: is empty; list token files or globs such as data/train/*.npy")
    dtype: str | None = args.token_dtype
    if dtype is None:
        dtype = _recorded_dtype(paths) if mix is None else mix.token_dtype
    token_dtype(dtype)
    sections = [args.sources[name] for name in by_source] if by_source else [args]
    masks = [path for section in sections for path in expand_paths(section.label_mask_paths)]
    return ResolvedFiles(paths, masks, dtype, {name: len(found) for name, found in by_source.items()}, paths)


def _recorded_dtype(paths: Sequence[str]) -> str:
    """The token type that the manifests beside some files say."""
    ask_ahead(paths)
    found = {manifest.token_dtype for path in paths if (manifest := manifest_beside(path)) is not None}
    if len(found) != 1:
        said = "no manifest.json beside the files says it" if not found else f"the manifests differ ({sorted(found)})"
        raise DataError(f"data.token_dtype: is not set and {said}; set it to one of {', '.join(TOKEN_DTYPES)}")
    return found.pop()


def copied_files(files: ResolvedFiles, cache_dir: str | None) -> ResolvedFiles:
    """The same files, the remote ones copied into a directory of this machine if there is one for it.

    Raises:
        DataError: A file cannot be read, or the directory not written.
    """
    if cache_dir is None:
        return files
    copies = {
        path: fetch(path, cache_dir) if is_remote(path) else path for path in (*files.paths, *files.label_mask_paths)
    }
    return replace(
        files,
        paths=[copies[path] for path in files.paths],
        label_mask_paths=[copies[path] for path in files.label_mask_paths],
    )


def check_data(args: DataArgs, *, limits: TokenLimits, global_batch_size: int | None = None) -> list[str]:
    """All problems of a data section that can be found without training. See `check_files`."""
    try:
        files = resolve_files(args)
    except DataError as error:
        return [str(error)]
    return check_files(args, files, limits=limits, global_batch_size=global_batch_size)[0]


def check_files(
    args: DataArgs, files: ResolvedFiles, *, limits: TokenLimits, global_batch_size: int | None
) -> tuple[list[str], dict[str, TokenFile]]:
    """All problems of the files of a data section.

    Sizes and manifests are checked of every file. Ids are read where `args.check` says: `quick` reads the beginning
    and some spots of up to a hundred files, `full` every token, and compares checksums with the manifest; `none` reads
    no ids. What is odd but may be meant is logged as a warning.

    Args:
        args: The section.
        files: What it names.
        limits: What the model and the tokenizer allow.
        global_batch_size: Instances of an optimizer step. None: any number of instances will do, but one is needed.

    Returns:
        The problems, and what is known of every file that could be opened, label masks among them.
    """
    problems = _type_problems(files.token_dtype, limits)
    found, unreadable = open_token_files(files.paths, token_dtype(files.token_dtype))
    problems += unreadable
    opened = list(found.values())
    origins = dict(zip(files.paths, files.origins, strict=True))
    if args.check != "none":
        ask_ahead(origins.values())
    for file in opened:
        origin = origins[file.path]
        try:
            problems += _size_problems(file, origin, args.sequence_length)
            if args.check != "none" or not is_remote(origin):
                problems += _manifest_problems(
                    file, origin, files.token_dtype, limits.eos_token_id, full=args.check == "full"
                )
        except DataError as error:
            problems.append(str(error))
    masks, unreadable = open_token_files(files.label_mask_paths, np.dtype(np.bool_))
    problems += unreadable + _mask_problems(files, found, masks)
    if args.check != "none":
        problems += content_problems(opened, limits, full=args.check == "full")
    if not problems:
        problems = _amount_problems(args, files, opened, global_batch_size)
    return problems, {**found, **masks}


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


def _size_problems(file: TokenFile, origin: str, sequence_length: int) -> list[str]:
    if file.num_tokens == 0:
        return [f"{file.path}: is empty; remove it from data.paths or prepare it again"]
    if file.num_tokens < sequence_length:
        text = f"{file.path}: {file.num_tokens:,} tokens are shorter than one instance of {sequence_length:,}"
        # The last file of a prepared folder may be short; that is no sign of damage.
        if recorded(origin) is None:
            return [f"{text}; remove it from data.paths or lower data.sequence_length"]
        logger.warning("%s; none of it is used", text)
    return []


def _manifest_problems(file: TokenFile, origin: str, dtype: str, eos_token_id: int | None, *, full: bool) -> list[str]:
    manifest = manifest_beside(origin)
    if manifest is None:
        return []
    problems = []
    if manifest.token_dtype != dtype:
        problems.append(
            f"{origin}: the manifest beside it says {manifest.token_dtype}, data.token_dtype says {dtype}; "
            "remove data.token_dtype"
        )
    if eos_token_id is not None and manifest.eos_token_id != eos_token_id:
        problems.append(
            f"{origin}: its documents end with id {manifest.eos_token_id} (manifest), the model's end of text is "
            f"{eos_token_id}; use the tokenizer the data were made with ({manifest.tokenizer})"
        )
    said = recorded(origin)
    if said is None:
        logger.warning("%s: the manifest beside it does not list it", origin)
    elif said.size_bytes != file.size_bytes:
        problems.append(
            f"{origin}: {file.size_bytes:,} bytes, the manifest says {said.size_bytes:,}; prepare it again"
        )
    elif full and _checksum(file) != said.sha256:
        problems.append(f"{origin}: its checksum is not the manifest's; it was changed. Prepare it again")
    return problems


def _checksum(file: TokenFile) -> str:
    if is_remote(file.path):
        return sha256_remote(file.path, file.size_bytes, file.identity)
    return file_sha256(file.path)


def _mask_problems(files: ResolvedFiles, found: dict[str, TokenFile], masks: dict[str, TokenFile]) -> list[str]:
    if not files.label_mask_paths:
        return []
    if len(files.label_mask_paths) != len(files.paths):
        return [
            f"data.label_mask_paths: {len(files.label_mask_paths)} files for {len(files.paths)} token files; expected "
            "one for each, in order"
        ]
    problems, reader = [], TokenReader()
    for path, mask_path in dict.fromkeys(zip(files.paths, files.label_mask_paths, strict=True)):
        mask, file = masks.get(mask_path), found.get(path)
        if mask is None or file is None:
            continue
        if mask.num_tokens != file.num_tokens:
            problems.append(
                f"{mask_path}: {mask.num_tokens:,} label flags for the {file.num_tokens:,} tokens of {path}; "
                "expected one byte per token"
            )
            continue
        try:
            head = reader.read(mask, 0, min(HEAD_TOKENS, mask.num_tokens)).view(np.uint8)
        except DataError as error:
            problems.append(str(error))
            continue
        if head.size and head.max() > 1:
            problems.append(f"{mask_path}: holds the byte {head.max()}, expected label flags of 0 or 1")
    return problems
