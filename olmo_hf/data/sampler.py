"""Which places of the order one rank reads, micro-batch by micro-batch."""

from collections.abc import Iterator

from torch.utils.data import Sampler


class GlobalBatchSampler(Sampler[list[int]]):
    """Micro-batches of one rank, as offsets into an `OrderedDataset`.

    Step k of the run is the k-th stretch of `global_batch_size` places; rank r reads those that are r modulo
    `world_size` (spec: data.md section 5), so what a step contains depends on no split of the work.

    Args:
        steps: Optimizer steps to give batches for.
        global_batch_size: Instances of a step over all ranks; a multiple of `world_size`.
        per_device_batch_size: Instances of a micro-batch; the last one of a step may be smaller.
        rank: This process.
        world_size: Number of processes.
    """

    def __init__(self, *, steps: int, global_batch_size: int, per_device_batch_size: int, rank: int, world_size: int):
        if global_batch_size % world_size:
            raise ValueError(f"a global batch of {global_batch_size} cannot be dealt to {world_size} ranks")
        self.steps = steps
        self.global_batch_size = global_batch_size
        self.per_device_batch_size = per_device_batch_size
        self.rank = rank
        self.world_size = world_size

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches this rank reads in one step."""
        return -(-(self.global_batch_size // self.world_size) // self.per_device_batch_size)

    def __len__(self) -> int:
        return self.steps * self.micro_batches_per_step

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.steps):
            first = step * self.global_batch_size
            offsets = range(first + self.rank, first + self.global_batch_size, self.world_size)
            for begin in range(0, len(offsets), self.per_device_batch_size):
                yield list(offsets[begin : begin + self.per_device_batch_size])
