"""A mix of sources in exact proportions: how many instances each gives, and which.

Shapes: `B` instances of a fetch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from olmo_hf.data.args import SourceArgs
from olmo_hf.data.epoch_order import key64, permuted
from olmo_hf.data.instance_batch import InstanceBatch
from olmo_hf.data.memmap import InstanceLocation, MemMapDataset
from olmo_hf.errors import DataError


@dataclass(frozen=True)
class MixedSource:
    """The part of one source in an epoch of the mix.

    Attributes:
        name: Its name.
        available: Instances its files hold.
        taken: Instances an epoch of the mix takes; more than there are means repetition.
    """

    name: str
    available: int
    taken: int


def plan_mix(
    sources: Mapping[str, SourceArgs], available: Mapping[str, int], *, sequence_length: int, mix_tokens: int | None
) -> list[MixedSource]:
    """How many instances of each source an epoch of the mix takes; by name, in alphabetical order.

    `repeat` takes so many times what there is, `tokens` so many tokens, `weight` a share of what all weighted sources
    give together: `mix_tokens` less what the others give, or, without it, as much as can be had without repeating any.
    Shares are rounded by largest remainder, so that they add up exactly (Hamilton's method).

    Raises:
        DataError: A source is empty, or the numbers leave nothing for the weights.
    """
    problems = [f"data.sources.{name}: holds no whole instance" for name in sorted(sources) if not available[name]]
    if problems:
        raise DataError("\n".join(problems))
    taken: dict[str, int] = {}
    for name, source in sources.items():
        if source.tokens is not None:
            taken[name] = source.tokens // sequence_length
        elif source.weight is None:
            repeat = Fraction(str(1 if source.repeat is None else source.repeat))
            taken[name] = int(repeat * available[name])
    weights = {name: Fraction(str(source.weight)) for name, source in sources.items() if source.weight is not None}
    if weights:
        whole = sum(weights.values())
        shares = {name: weight / whole for name, weight in weights.items()}
        if mix_tokens is None:
            total = int(min(available[name] / share for name, share in shares.items()))
        else:
            total = mix_tokens // sequence_length - sum(taken.values())
        if total < 1:
            raise DataError(
                f"data.mix_tokens: found {mix_tokens}, which leaves nothing for the weighted sources; raise it, or "
                "give the others less"
            )
        taken |= _apportion(shares, total)
    return [MixedSource(name, available[name], taken[name]) for name in sorted(sources)]


def _apportion(shares: Mapping[str, Fraction], total: int) -> dict[str, int]:
    """Whole numbers in the proportion of the shares that add up to `total`."""
    exact = {name: share * total for name, share in shares.items()}
    counts = {name: int(value) for name, value in exact.items()}
    # Ties go to the name that comes first: the result must not depend on the order of a mapping.
    neediest = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in neediest[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


class MixedDataset(Dataset[dict[str, Any]]):
    """Sources in the proportions of a mix, as one data set whose instances are numbered source by source.

    Identical to `dataset` except that a source may give only some of its instances, or some more than once: all of
    them as often as they fit, in file order, and the rest drawn without repetition by seed. Items also carry `source`,
    the number of the source in alphabetical order.

    Args:
        dataset: All files of all sources, in the order of `mix`.
        mix: The sources.
        seed: Seed of the draw.
    """

    def __init__(self, dataset: MemMapDataset, mix: Sequence[MixedSource], *, seed: int):
        assert sum(source.available for source in mix) == len(dataset)
        self.dataset = dataset
        self.mix = list(mix)
        self.seed = seed
        self.sequence_length = dataset.sequence_length
        self.paths = dataset.paths
        self._first_taken = np.concatenate([[0], np.cumsum([s.taken for s in mix], dtype=np.int64)])
        self._available = np.array([s.available for s in mix], np.int64)
        self._whole_repetitions = np.array([s.taken // s.available for s in mix], np.int64)
        self._first_available = np.concatenate([[0], np.cumsum([s.available for s in mix], dtype=np.int64)])

    @property
    def source_names(self) -> list[str]:
        """Name of each source, by its number."""
        return [source.name for source in self.mix]

    def __len__(self) -> int:
        return int(self._first_taken[-1])

    def instance_of(self, index: int) -> int:
        """Which instance of `dataset` an instance of the mix is.

        Raises:
            IndexError: There is no such instance.
        """
        return int(self._resolve(np.array([index]))[0][0])

    def _resolve(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Instances of `dataset`, and numbers of their sources, of instances of the mix; all of shape (B,)."""
        outside = (indices < -len(self)) | (indices >= len(self))
        if outside.any():
            raise IndexError(f"instance {indices[outside][0]} of {len(self)}")
        indices = indices % len(self)
        numbers = np.searchsorted(self._first_taken, indices, side="right") - 1
        repetitions, places = np.divmod(indices - self._first_taken[numbers], self._available[numbers])
        # The last repetition of a source may be a part of it: that is drawn, not its beginning.
        for number in np.unique(numbers[repetitions == self._whole_repetitions[numbers]]).tolist():
            drawn = (numbers == number) & (repetitions == self._whole_repetitions[number])
            source = self.mix[number]
            seed = int(key64(self.seed, number) >> np.uint64(1))
            epoch = source.taken // source.available
            places[drawn] = permuted(places[drawn], source.available, seed=seed, epoch=epoch)
        return self._first_available[numbers] + places, numbers

    def locate(self, index: int) -> InstanceLocation:
        """File and place of an instance."""
        return self.dataset.locate(self.instance_of(index))

    def __getitem__(self, index: int) -> dict[str, Any]:
        item: dict[str, Any] = self.__getitems__([index])[0]
        return item

    def __getitems__(self, indices: Sequence[int] | np.ndarray) -> InstanceBatch:
        instances, numbers = self._resolve(np.asarray(indices, np.int64))
        batch = self.dataset.__getitems__(instances)
        batch.columns["source"] = numbers.tolist()
        return batch


def describe_mix(mix: Sequence[MixedSource], sequence_length: int) -> str:
    """The mix as a table for people."""
    total = sum(source.taken for source in mix)
    width = max(len(source.name) for source in mix)
    lines = [f"an epoch of the mix: {total:,} instances, {total * sequence_length:,} tokens"]
    lines += [
        f"  {source.name:{width}}  {source.taken:>12,} of {source.available:>12,} instances  "
        f"{100 * source.taken / total:6.2f} %  x {source.taken / source.available:.3f}"
        for source in mix
    ]
    return "\n".join(lines)
