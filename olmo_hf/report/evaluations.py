"""The picture of `olmo-hf evaluate`: what was measured of models, over the steps of their run or side by side."""

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from olmo_hf.report.png import COLORS

_PANELS = (
    ("share of questions", ("_acc", "_f1", "_len_norm", "_pmi_dc")),
    ("bits per byte", ("_bpb", "/BitsPerByte")),
    ("nats per character", ("_ce_loss",)),
    ("cross-entropy (nats per token)", ("/CrossEntropyLoss",)),
)
_INK = "#1f2937"


def draw_evaluations(
    columns: Sequence[tuple[str, Sequence[float | None]]], places: Sequence[int | str], path: Path
) -> None:
    """One panel per kind of metric.

    Args:
        columns: metric and its value for each model.
        places: step of each model, or its name where some have none.
        path: of the picture.
    """
    panels = [
        (title, [(name, values) for name, values in columns if name.endswith(endings)]) for title, endings in _PANELS
    ]
    panels = [(title, found) for title, found in panels if found]
    over_steps = all(isinstance(place, int) for place in places)
    figure = Figure(figsize=(10, 0.6 + 3.4 * max(1, len(panels))), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(1, len(panels)), 1, squeeze=False)[:, 0]
    for axis, (title, found) in zip(axes, panels, strict=False):
        axis.set_ylabel(title, color=_INK)
        for number, (name, values) in enumerate(found):
            _line(axis, name, values, places if over_steps else range(len(places)), COLORS[number % len(COLORS)])
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if over_steps:
            axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        else:
            axis.set_xticks(range(len(places)), [str(place) for place in places], rotation=15)
        axis.legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), labelcolor=_INK)
    if over_steps:
        axes[-1].set_xlabel("step", color=_INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _line(axis: Axes, name: str, values: Sequence[float | None], places: Sequence[int | str], color: str) -> None:
    numbers = [math.nan if value is None else value for value in values]
    axis.plot(list(places), numbers, marker="o", markersize=4, linewidth=1.4, color=color, label=_short(name))


def _short(name: str) -> str:
    words = name.removeprefix("eval/").split("/")
    return words[-1] if words[0].startswith("downstream") else words[0]
