"""What may be asked of the data: the `data` section of a run's YAML, and the data of an evaluator."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

TokenDtype = Literal["uint8", "uint16", "uint32", "uint64"]

OrderName = Literal["shuffle", "permutation", "random_offsets"]


@dataclass(frozen=True, kw_only=True)
class InstanceFilterArgs:
    """Drops the labels of instances with long periodic repetitions (spec: data.md section 7)."""

    repetition_max_period: int = 13
    """Longest period looked for, in tokens."""

    repetition_min_period: int = 1
    """Shortest period looked for, in tokens."""

    repetition_max_count: int = 32
    """An instance in which a period repeats at least this often is masked."""


@dataclass(frozen=True, kw_only=True)
class SourceArgs:
    """One source of a mix. At most one of `weight`, `tokens` and `repeat`; none of them takes all of it once."""

    paths: tuple[str, ...] = ()
    """Token files or globs."""

    label_mask_paths: tuple[str, ...] = ()
    """One file of label flags per token file; either every source has them or none."""

    weight: float | None = None
    """Share among the weighted sources; the shares need not add up to anything."""

    tokens: int | None = None
    """Tokens an epoch of the mix takes from it."""

    repeat: float | None = None
    """How often an epoch of the mix takes what there is; 0.5 takes half of it, 2 all of it twice."""


@dataclass(frozen=True, kw_only=True)
class DataArgs:
    """Token files in, a public global order out."""

    paths: tuple[str, ...] = ()
    """Token files or globs, in the order that numbers the instances."""

    mix: str | None = None
    """Instead of `paths`: a list of files by name, from `olmo_hf/data/mixes/`, in its published order. It says the
    `token_dtype` too."""

    mix_base: str | None = None
    """Directory or URL below which the files of `mix` lie. None: where they are published."""

    sources: dict[str, SourceArgs] = field(default_factory=dict)
    """Instead of `paths`: named sources mixed in exact proportions. Instances are numbered source by source, in
    alphabetical order of the names."""

    mix_tokens: int | None = None
    """With weighted `sources`: tokens of an epoch of the mix. None: as many as give no weighted source twice."""

    token_dtype: TokenDtype | None = None
    """Type of a token id on disk. None: taken from the manifest beside the files."""

    label_mask_paths: tuple[str, ...] = ()
    """One file of booleans (one byte per token) per token file: True is trained on."""

    cache_dir: str | None = None
    """Local directory into which remote files are copied whole before training. None: they are read over the network,
    stretch by stretch."""

    sequence_length: int = 2048
    """Tokens per instance."""

    seed: int | None = None
    """Seed of the global order. None: `training.seed`."""

    shuffle: bool = True
    """False reads the instances in file order."""

    order: OrderName = "shuffle"
    """`shuffle`: the original's order, a table of all instances made once per epoch. `permutation`: another order of
    the same kind, computed without a table, for any number of instances. `random_offsets`: every instance begins at a
    random token, drawn with replacement; there are no epochs."""

    index_dir: str | None = None
    """Directory for the tables of `shuffle`, on a disk of each machine. None: in memory, or for more than 16 million
    instances under `HF_HOME`."""

    instance_filter: InstanceFilterArgs | None = None
    """Presence turns the repetition filter on."""

    document_masking: bool = False
    """True: attention never crosses a document boundary (found by the end-of-text id)."""

    document_positions: Literal["keep", "reset"] = "keep"
    """With `document_masking`: whether positions run on (as the original) or restart in each document."""

    num_workers: int = 0
    """Processes that read ahead, per rank."""

    prefetch_factor: int = 2
    """Micro-batches each worker holds ready."""

    pin_memory: bool = False
    """Page-locked host memory, for a GPU."""

    check: Literal["full", "quick", "none"] = "quick"
    """Before training: `quick` checks sizes and samples ids; `full` reads every token; `none` looks at sizes only."""


def data_problems(data: DataArgs, key: str) -> Iterator[str]:
    """Contradictions within a section, each a sentence that begins with the field.

    Args:
        data: The section.
        key: Its dotted name, `data` or that of an evaluator's.
    """
    masks, paths = data.label_mask_paths, data.paths
    if masks and data.sources:
        yield f"{key}.label_mask_paths: given beside `sources`; give each source its own `label_mask_paths`"
    elif masks and len(masks) != len(paths) and not any(c in path for path in (*masks, *paths) for c in "*?["):
        yield f"{key}.label_mask_paths: found {len(masks)} for {len(paths)} token files; give one mask per token file"
    if data.document_positions == "reset" and not data.document_masking:
        yield f"{key}.document_positions: found 'reset' without masking; set `{key}.document_masking: true` too"
    if data.order != "shuffle" and not data.shuffle:
        yield f"{key}.order: found {data.order!r} with `{key}.shuffle: false`; remove one of them"
    if data.order == "random_offsets" and data.sources:
        yield f"{key}.order: found 'random_offsets' with `{key}.sources`; mixes are of whole instances"
    yield from _source_problems(data, key)


def _source_problems(data: DataArgs, key: str) -> Iterator[str]:
    for name, source in data.sources.items():
        given = [kind for kind in ("weight", "tokens", "repeat") if getattr(source, kind) is not None]
        if len(given) > 1:
            yield f"{key}.sources.{name}: found {' and '.join(given)}, expected one of weight, tokens and repeat"
        for kind in given:
            if getattr(source, kind) <= 0:
                yield f"{key}.sources.{name}.{kind}: found {getattr(source, kind)}, expected more than 0"
        if not source.paths:
            yield f"{key}.sources.{name}.paths: is empty; list token files or globs"
    if data.mix_tokens is not None and not any(source.weight is not None for source in data.sources.values()):
        yield f"{key}.mix_tokens: is set, but no source has a weight; remove it or give weights"
