"""The order of a run: what stands at which place from where the run begins, through all epochs.

Shapes: `N` instances of the data set, `G` instances of a global batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from olmo_hf.data.args import OrderName
from olmo_hf.data.epoch_order import drawn, global_indices, permuted
from olmo_hf.data.instance_batch import InstanceBatch
from olmo_hf.data.memmap import MemMapDataset
from olmo_hf.data.mixing import MixedDataset
from olmo_hf.data.order_index import open_index
from olmo_hf.errors import DataError


@dataclass(frozen=True)
class DataPosition:
    """How far a run has read. All that a checkpoint needs to continue with the next instance, on any world size.

    Attributes:
        epoch: Epoch of the last batch that was read, from 0.
        instances: Instances of that epoch already consumed, over all ranks.
    """

    epoch: int = 0
    instances: int = 0


def _check_batch(global_batch_size: int, num_instances: int) -> None:
    if num_instances < global_batch_size:
        raise DataError(
            f"the data hold {num_instances:,} instances, fewer than one global batch of {global_batch_size:,}; "
            "lower training.global_train_batch_size or data.sequence_length, or add data"
        )


def advance(position: DataPosition, steps: int, *, global_batch_size: int, num_instances: int) -> DataPosition:
    """The position after `steps` more global batches.

    An epoch gives as many whole batches as fit behind where it was entered; what is left over is dropped. At the
    very end of an epoch the position stays in it: the next batch is the first of the next epoch.

    Raises:
        DataError: The data set is smaller than one global batch.
    """
    _check_batch(global_batch_size, num_instances)
    left = max(num_instances - position.instances, 0) // global_batch_size
    if steps <= left:
        return DataPosition(position.epoch, position.instances + steps * global_batch_size)
    per_epoch = num_instances // global_batch_size
    whole_epochs, rest = divmod(steps - left - 1, per_epoch)
    return DataPosition(position.epoch + 1 + whole_epochs, (rest + 1) * global_batch_size)


ENDLESS = 2**62
"""Instances of the only epoch of an order that draws with replacement."""


class OrderedDataset(Dataset[dict[str, Any]]):
    """A data set read in the order of a run, from `start` on and through the epochs without end.

    Item k is the k-th instance after `start`. Epoch and place follow from k by arithmetic and every epoch's order
    from the seed, so nothing has to be told to worker processes when an epoch ends, and starting late costs nothing.
    Items are those of `dataset` with `index`, the id of the instance.

    Args:
        dataset: The instances.
        seed: Seed of the order; epoch e uses `seed + e`.
        shuffle: False reads the instances in file order.
        global_batch_size: Instances of an optimizer step over all ranks; an epoch ends with its last whole batch.
        start: Where the run begins or continues.
        order: `shuffle`, the original's; `permutation`, computed place by place without a table; `random_offsets`,
            independent draws without epochs.
        index_dir: Directory in which shuffled orders are kept and memory-mapped, shared by all processes of a
            machine. None: each process holds the order in memory.

    Raises:
        DataError: The data set is smaller than one global batch, or `start` lies behind its end.
    """

    def __init__(
        self,
        dataset: MemMapDataset | MixedDataset,
        *,
        seed: int,
        shuffle: bool,
        global_batch_size: int,
        start: DataPosition,
        order: OrderName = "shuffle",
        index_dir: str | None = None,
    ):
        self.dataset = dataset
        self.seed = seed
        self.shuffle = shuffle
        self.global_batch_size = global_batch_size
        self.start = start
        self.order = order
        self.index_dir = index_dir
        self.num_instances = len(dataset) if order != "random_offsets" else ENDLESS
        _check_batch(global_batch_size, self.num_instances)
        if start.instances > self.num_instances:
            raise DataError(
                f"the run was {start.instances:,} instances into its epoch, but the data hold {self.num_instances:,}; "
                "these are not the data it was started with. Restore data.paths, or begin a new run"
            )
        self._tables: dict[int, np.ndarray] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches of an epoch read from its beginning."""
        return self.num_instances // self.global_batch_size

    def starting_at(self, start: DataPosition) -> "OrderedDataset":
        """The same order, beginning elsewhere."""
        return OrderedDataset(
            self.dataset,
            seed=self.seed,
            shuffle=self.shuffle,
            global_batch_size=self.global_batch_size,
            start=start,
            order=self.order,
            index_dir=self.index_dir,
        )

    def __len__(self) -> int:
        """Instances from `start` that are read before the epoch of `start` ends."""
        return (self.num_instances - self.start.instances) // self.global_batch_size * self.global_batch_size

    def __getstate__(self) -> dict[str, Any]:
        # Tables are made where they are needed; sending them to every worker would cost more.
        return {**self.__dict__, "_tables": {}}

    def position(self, offset: int) -> DataPosition:
        """Epoch and place in it of the instance `offset` behind the start.

        Raises:
            IndexError: `offset` is negative: there is no end to count from.
        """
        if offset < 0:
            raise IndexError(f"offset {offset}: the order has no end, so offsets count from its start")
        if offset < len(self):
            return DataPosition(self.start.epoch, self.start.instances + offset)
        epochs, place = divmod(offset - len(self), self.steps_per_epoch * self.global_batch_size)
        return DataPosition(self.start.epoch + 1 + epochs, place)

    def instance_ids(self, first: int, last: int) -> np.ndarray:
        """Ids of the instances `[first, last)` behind the start, int64, (last - first,)."""
        pieces = [np.empty(0, np.int64)]
        while first < last:
            place = self.position(first)
            # From here to the end of this epoch the places run on.
            run = len(self) if place.epoch == self.start.epoch else self.steps_per_epoch * self.global_batch_size
            begin = self.start.instances if place.epoch == self.start.epoch else 0
            count = min(last - first, begin + run - place.instances)
            pieces.append(self._ids(place.epoch, np.arange(place.instances, place.instances + count)))
            first += count
        return np.concatenate(pieces)

    def __getitem__(self, offset: int) -> dict[str, Any]:
        item: dict[str, Any] = self.__getitems__([offset])[0]
        return item

    def __getitems__(self, offsets: Sequence[int]) -> InstanceBatch:
        places = np.asarray(offsets, np.int64)  # (B,)
        if places.size and places.min() < 0:
            self.position(int(places.min()))
        # The arithmetic of `position`, for all at once.
        behind = places - len(self)
        per_epoch = self.steps_per_epoch * self.global_batch_size
        epochs = np.where(behind < 0, self.start.epoch, self.start.epoch + 1 + behind // per_epoch)
        places = np.where(behind < 0, self.start.instances + places, behind % per_epoch)
        ids = np.empty(places.size, np.int64)
        for epoch in np.unique(epochs).tolist():
            ids[epochs == epoch] = self._ids(epoch, places[epochs == epoch])
        batch = self.dataset.__getitems__(ids)
        batch.columns["index"] = ids.tolist()
        return batch

    def _ids(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Ids at some places of an epoch, int64."""
        if self.order == "random_offsets":
            return drawn(places, len(self.dataset), seed=self.seed)
        if self.order == "permutation":
            return permuted(places, self.num_instances, seed=self.seed, epoch=epoch)
        if epoch not in self._tables:
            # Two epochs are in use at once around their border, never more.
            if len(self._tables) == 2:
                del self._tables[min(self._tables)]
            self._tables[epoch] = self._table(epoch)
        return self._tables[epoch][places].astype(np.int64)

    def _table(self, epoch: int) -> np.ndarray:
        """The order of a whole epoch."""
        if self.index_dir is None or not self.shuffle:
            return global_indices(self.num_instances, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
        return open_index(self.index_dir, self.num_instances, seed=self.seed, epoch=epoch)
