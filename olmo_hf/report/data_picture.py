"""A picture of what is in a data set."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from olmo_hf.data.inspection import DatasetStatistics

MAX_SOURCES = 12
"""Sources drawn with a bar of their own; the rest share one."""


def draw_statistics(statistics: DatasetStatistics, path: Path) -> None:
    """Draws document lengths and the share of each source into a PNG.

    Args:
        statistics: What was found.
        path: File to write.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    lengths, shares = figure.subplots(1, 2)
    if statistics.document_lengths.size:
        longest = max(int(statistics.document_lengths.max()), 2)
        lengths.hist(statistics.document_lengths, bins=np.geomspace(1, longest, 40).tolist())
        lengths.set_xscale("log")
    lengths.set(title="Pieces of documents inside instances", xlabel="tokens", ylabel="pieces")
    names, counts = _largest(statistics.instances_by_source)
    total = max(sum(counts), 1)
    shares.barh(names, [100 * count / total for count in counts])
    shares.invert_yaxis()
    shares.set(title="Share of an epoch", xlabel="percent of the instances")
    figure.suptitle(
        f"{statistics.num_instances:,} instances, {statistics.num_inspected:,} looked at, "
        f"{statistics.num_masked:,} masked as repetitive"
    )
    figure.savefig(path, format="png", dpi=120)


def _largest(instances_by_source: dict[str, int]) -> tuple[list[str], list[int]]:
    ordered = sorted(instances_by_source.items(), key=lambda item: -item[1])
    shown, rest = ordered[:MAX_SOURCES], ordered[MAX_SOURCES:]
    if rest:
        shown.append((f"{len(rest)} more", sum(count for _, count in rest)))
    return [Path(name).name or name for name, _ in shown], [count for _, count in shown]
