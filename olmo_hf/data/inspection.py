"""Questions about the data of a run, answered without training.

Shapes: `S` tokens of an instance, `W` ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from olmo_hf.data.args import InstanceFilterArgs
from olmo_hf.data.documents import document_lengths
from olmo_hf.data.filters import keep_instance
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.data.mixing import MixedDataset
from olmo_hf.data.order import DataPosition, OrderedDataset
from olmo_hf.errors import DataError


@dataclass(frozen=True)
class InspectedInstance:
    """One instance of a step.

    Attributes:
        instance_id: Its id.
        path: File it lies in.
        offset_tokens: First token in that file.
        source: Name of its source in a mix.
        tokens: Its tokens, shape (S,).
        is_kept: Whether the repetition filter leaves its labels.
    """

    instance_id: int
    path: str
    offset_tokens: int
    source: str | None
    tokens: np.ndarray
    is_kept: bool


def ids_of_step(data: OrderedDataset, step: int) -> np.ndarray:
    """Ids of the instances that step `step` (from 1) reads over all ranks, (global batch,), in their order.

    Raises:
        DataError: Steps count from 1.
    """
    if step < 1:
        raise DataError(f"--step: found {step}, expected 1 or more")
    return data.instance_ids((step - 1) * data.global_batch_size, step * data.global_batch_size)


def data_of_step(data: OrderedDataset, returns: Sequence[tuple[int, DataPosition]], step: int) -> np.ndarray:
    """Identical to `ids_of_step` for a run that went back and passed over batches.

    Args:
        data: The order, from the beginning of the run.
        returns: The step and the place in the data from which the run went on, each time.
        step: From 1.
    """
    before = [(first, position) for first, position in returns if first < step]
    return ids_of_step(data.starting_at(before[-1][1]), step - before[-1][0]) if before else ids_of_step(data, step)


def ids_of_rank(ids: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    """The part of a step's ids, (global batch,), that one rank reads.

    Raises:
        DataError: There is no such rank, or the batch cannot be dealt to so many.
    """
    if not 0 <= rank < world_size:
        raise DataError(f"--rank: found {rank}, expected 0 to {world_size - 1} (--world-size {world_size})")
    if ids.size % world_size:
        raise DataError(
            f"--world-size: a global batch of {ids.size} instances cannot be dealt to {world_size} ranks; give a "
            "divisor of it"
        )
    return ids[rank::world_size]


def inspect_instances(data: OrderedDataset, ids: np.ndarray) -> Iterator[InspectedInstance]:
    """What instances are and where they lie."""
    dataset = data.dataset
    for instance_id in ids.tolist():
        item = dataset[instance_id]
        place = dataset.locate(instance_id)
        source = dataset.source_names[item["source"]] if isinstance(dataset, MixedDataset) else None
        yield InspectedInstance(
            instance_id=instance_id,
            path=place.path,
            offset_tokens=place.offset_tokens,
            source=source,
            tokens=item["input_ids"].numpy(),
            is_kept=bool(item.get("instance_mask", True)),
        )


@dataclass(frozen=True)
class OrderDifference:
    """How two orders differ.

    Attributes:
        steps: Steps compared.
        first_different_step: First step, from 1, that reads something else. None: there is none.
        first_reordered_step: First step that reads its instances in another order. None: there is none.
        shared: Instances that both read in these steps.
        only_first: Instances only the first reads.
        only_second: Instances only the second reads.
    """

    steps: int
    first_different_step: int | None
    first_reordered_step: int | None
    shared: int
    only_first: int
    only_second: int


def compare_orders(first: OrderedDataset, second: OrderedDataset, steps: int) -> OrderDifference:
    """Compares what two runs read in their first steps, by place in the files, not by id.

    Two lists of files number their instances differently; what is compared is file and offset.
    """
    different, reordered = None, None
    seen: list[set[tuple[str, int]]] = [set(), set()]
    for step in range(1, steps + 1):
        places = [_places(data, ids_of_step(data, step)) for data in (first, second)]
        for total, found in zip(seen, places, strict=True):
            total.update(found)
        if different is None and sorted(places[0]) != sorted(places[1]):
            different = step
        if reordered is None and places[0] != places[1]:
            reordered = step
    return OrderDifference(
        steps=steps,
        first_different_step=different,
        first_reordered_step=reordered,
        shared=len(seen[0] & seen[1]),
        only_first=len(seen[0] - seen[1]),
        only_second=len(seen[1] - seen[0]),
    )


def _places(data: OrderedDataset, ids: np.ndarray) -> list[tuple[str, int]]:
    found = [data.dataset.locate(instance_id) for instance_id in ids.tolist()]
    return [(place.path, place.offset_tokens) for place in found]


@dataclass(frozen=True)
class DatasetStatistics:
    """What is in a data set, from some of its instances.

    Attributes:
        num_instances: Instances of the data set.
        num_inspected: Instances looked at, evenly spread.
        document_lengths: Length of every piece of a document found in them, in tokens. Empty without an eos id.
        num_whole_documents: End-of-text tokens among them.
        num_masked: Instances the repetition filter masks, or would mask if it were on.
        learned_tokens: Tokens with a label, of all that were looked at.
        tokens: Tokens looked at.
        instances_by_source: Instances of an epoch by source, or by file where there are no sources.
    """

    num_instances: int
    num_inspected: int
    document_lengths: np.ndarray
    num_whole_documents: int
    num_masked: int
    learned_tokens: int
    tokens: int
    instances_by_source: dict[str, int]


def dataset_statistics(
    dataset: MemMapDataset | MixedDataset,
    *,
    eos_token_id: int | None,
    instance_filter: InstanceFilterArgs,
    max_instances: int,
) -> DatasetStatistics:
    """Looks at up to `max_instances` instances, evenly spread over the data set."""
    count = min(max_instances, len(dataset))
    lengths, whole, masked, learned, tokens = [], 0, 0, 0, 0
    for number in range(count):
        item = dataset[number * len(dataset) // count]
        ids = item["input_ids"].numpy()
        kept = keep_instance(ids, instance_filter)
        masked += not kept
        tokens += ids.size
        if item.get("instance_mask", True):
            learned += int(item["label_mask"].sum()) if "label_mask" in item else ids.size
        if eos_token_id is not None:
            lengths.append(document_lengths(ids, eos_token_id))
            whole += int(np.count_nonzero(ids == eos_token_id))
    return DatasetStatistics(
        num_instances=len(dataset),
        num_inspected=count,
        document_lengths=np.concatenate(lengths) if lengths else np.empty(0, np.int32),
        num_whole_documents=whole,
        num_masked=masked,
        learned_tokens=learned,
        tokens=tokens,
        instances_by_source=_instances_by_source(dataset),
    )


def _instances_by_source(dataset: MemMapDataset | MixedDataset) -> dict[str, int]:
    if isinstance(dataset, MixedDataset):
        return {source.name: source.taken for source in dataset.mix}
    counts: dict[str, int] = {}
    for path, (first, last) in zip(dataset.paths, dataset.file_offsets, strict=True):
        counts[path] = counts.get(path, 0) + last - first
    return counts


@dataclass(frozen=True)
class Agreement:
    """Whether a run read what its order says.

    Attributes:
        steps: Steps that were recorded by every rank that took part in them.
        disagreeing: Those among them in which some rank read something else.
        incomplete: Steps that some rank did not record.
    """

    steps: list[int]
    disagreeing: list[int]
    incomplete: list[int]


def ranks_of_step(data: OrderedDataset, recorded: list[dict[int, list[int]]], step: int) -> int:
    """Number of ranks that shared a step, from what rank 0 read of it; a restart may have changed it.

    Returns:
        The number; 0 if rank 0 recorded no whole share.
    """
    share = len(recorded[0].get(step, ()))
    return data.global_batch_size // share if share and data.global_batch_size % share == 0 else 0


def compare_with_record(
    data: OrderedDataset, recorded: list[dict[int, list[int]]], returns: Sequence[tuple[int, DataPosition]] = ()
) -> Agreement:
    """Compares a run's recorded ids, by rank and step, with its order.

    Args:
        data: The order, from the beginning of the run.
        recorded: Ids by step of every rank that ever took part.
        returns: Where the run went on after it had passed over batches, as in `data_of_step`.
    """
    steps, disagreeing, incomplete = [], [], []
    for step in sorted(set().union(*recorded)):
        world_size = ranks_of_step(data, recorded, step)
        parts = [ids.get(step) for ids in recorded[:world_size]]
        if step not in recorded[0]:
            # Left over from before a restart with fewer ranks, or lost with rank 0.
            if step > max(recorded[0], default=0):
                continue
            incomplete.append(step)
        elif world_size and (world_size > len(recorded) or None in parts):
            incomplete.append(step)
        else:
            steps.append(step)
            ids = data_of_step(data, returns, step)
            if not world_size or parts != [ids_of_rank(ids, rank, world_size).tolist() for rank in range(world_size)]:
                disagreeing.append(step)
    return Agreement(steps, disagreeing, incomplete)


def describe_steps(steps: list[int], *, most: int = 20) -> str:
    """Steps as a short list of ranges: `3, 5-9`."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:most])
    return shown if len(runs) <= most else f"{shown}, ..."
