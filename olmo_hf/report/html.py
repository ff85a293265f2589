"""`report.html`: the flight recorder of one run or several in one file that needs nothing else."""

import datetime
import html
import json
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from olmo_hf.callbacks.json_lines import strict_json
from olmo_hf.report.charts import charts_of, label_of
from olmo_hf.report.history import History
from olmo_hf.report.packing import MAX_POINTS_ALL_RUNS, pack_map, pack_series
from olmo_hf.report.png import COLORS
from olmo_hf.report.smoothing import smooth
from olmo_hf.wording import duration, short_number

_SCRIPTS = ("numbers.js", "chart.js", "page.js")
_MAX_HAPPENINGS = 500
_OF_MACHINE = (("device", ""), ("threads", " threads"))
_ROUTINE = {"start", "checkpoint", "summary"}


def render_page(runs: Sequence[History], spikes: Mapping[str, list[dict[str, Any]]] | None = None) -> str:
    """The whole page as text.

    Args:
        runs: drawn over each other.
        spikes: by run name, what `spikes.describe_spikes` says.
    """
    page = resources.files("olmo_hf.report") / "page"
    title = runs[0].name if len(runs) == 1 else " / ".join(run.name for run in runs)
    points = MAX_POINTS_ALL_RUNS // len(runs)
    charts = _charts(runs)
    drawn = {name for chart in charts for name in chart["names"]}
    data = {
        "colors": COLORS,
        "subtitle": f"olmo_hf report, written {_clock_time(time.time())}",
        "tiles": _tiles(runs[0]) if len(runs) == 1 else [(run.name, _state_of(run)) for run in runs],
        "charts": charts,
        "runs": [_run_data(run, drawn, points, (spikes or {}).get(run.name, [])) for run in runs],
    }
    parts = {
        "TITLE": html.escape(title),
        "STYLE": (page / "page.css").read_text(encoding="utf-8"),
        # In a script element only "</" and "<!--" could end it early.
        "DATA": json.dumps(strict_json(data), allow_nan=False).replace("<", "\\u003c"),
        "SCRIPT": "\n".join((page / name).read_text(encoding="utf-8") for name in _SCRIPTS),
    }
    pieces = (page / "page.html").read_text(encoding="utf-8").split("@")
    return "".join(parts.get(piece, piece) for piece in pieces)


def _charts(runs: Sequence[History]) -> list[dict[str, Any]]:
    return [
        {
            "title": chart.title,
            "unit": chart.unit,
            "log_scale": chart.log_scale,
            "percent": chart.percent,
            "smooth": chart.smooth,
            "names": names,
            "labels": [label_of(name) for name in names],
        }
        for chart, names in charts_of(runs)
    ]


def _run_data(run: History, drawn: set[str], points: int, spikes: list[dict[str, Any]]) -> dict[str, Any]:
    config = run.run_dir / "config.yaml"
    return {
        "name": run.name,
        "map": pack_map(run),
        "series": {name: pack_series(series, points) for name, series in run.series.items() if name in drawn},
        "marks": _marks(run),
        "launches": _launches(run),
        "happenings": _happenings(run),
        "settings": config.read_text(encoding="utf-8") if config.is_file() else "",
        "spikes": spikes,
    }


def _marks(run: History) -> list[dict[str, Any]]:
    marks: list[dict[str, Any]] = [
        {"step": event["step"], "kind": "restart", "text": f"restarted at step {event['step']:,}"}
        for event in run.restarts
    ]
    checkpoints = {event["step"] for event in run.events_called("checkpoint")}
    marks += [{"step": step, "kind": "checkpoint", "text": "checkpoint"} for step in sorted(checkpoints)]
    marks += [
        {"step": event["step"], "kind": "spike", "text": "loss spike"} for event in run.events_called("loss_spike")
    ]
    marks += [
        {"step": event["step"], "kind": "rollback", "text": f"went back from step {event['from_step']:,}"}
        for event in run.events_called("rollback")
    ]
    marks += [{"step": event["step"], "kind": "stop", "text": _what(event)} for event in run.events_called("cancel")]
    evaluated = {int(step) for name, series in run.series.items() if name.startswith("eval/") for step in series.steps}
    marks += [{"step": step, "kind": "evaluation", "text": ""} for step in sorted(evaluated)]
    return marks


def _launches(run: History) -> list[list[str]]:
    """Rows of the table of launches: when, at which step, on what, and which settings were new."""
    rows = []
    for launch in run.launches:
        versions = ", ".join(f"{name} {number}" for name, number in launch.get("versions", {}).items())
        where = f"{launch.get('world_size', '?')} on {launch.get('host', '?')}"
        where += "".join(f", {launch[key]}{unit}" for key, unit in _OF_MACHINE if key in launch)
        when = str(launch.get("time", "")).replace("T", " ").replace("+00:00", " UTC")
        rows.append([when, f"{launch.get('step', 0):,}", where, versions, "\n".join(launch.get("changed", []))])
    return rows


def _happenings(run: History) -> list[list[str]]:
    told = [event for event in run.events if event.get("event") not in _ROUTINE][-_MAX_HAPPENINGS:]
    return [[_clock_time(event.get("time")), f"{event.get('step', 0):,}", _what(event)] for event in told]


def _what(event: Mapping[str, Any]) -> str:
    details = ", ".join(
        f"{key} {short_number(value) if isinstance(value, float) else value}"
        for key, value in event.items()
        if key not in ("step", "tokens", "time", "event", "settings", "max_steps", "environment", "position")
        and value is not None
    )
    name = str(event.get("event", "")).replace("_", " ")
    return f"{name}: {details}" if details else name


def _tiles(run: History) -> list[tuple[str, str]]:
    longest = max(run.series.values(), key=len)
    starts = run.events_called("start")
    end = f" / {starts[-1]['max_steps']:,}" if starts and starts[-1].get("max_steps") else ""
    tiles = [("step", f"{longest.steps[-1]:,}{end}"), ("tokens", short_number(float(longest.tokens[-1])))]
    if "train/CrossEntropyLoss" in run.series:
        tiles.append(("cross-entropy, recent", f"{smooth(run.series['train/CrossEntropyLoss'].values)[-1]:.4f}"))
    if "throughput/device/mfu" in run.series:
        tiles.append(("MFU, recent", f"{100 * smooth(run.series['throughput/device/mfu'].values)[-1]:.3g}%"))
    speed = run.series.get("throughput/tokens_per_second")
    if speed is not None:
        tiles.append(("tokens per second, recent", short_number(float(smooth(speed.values)[-1]))))
    tiles.append(("restarts", str(len(run.restarts))))
    tiles.append(("spikes", str(len(run.events_called("loss_spike")))))
    tiles.append(("state", _state_of(run)))
    return tiles


def _state_of(run: History) -> str:
    """Whether the run has ended, and why; a run without an end may be going on or may have been killed."""
    last = [event for event in run.events if event.get("event") in ("start", "end")][-1:]
    if last and last[0]["event"] == "end":
        reason = last[0].get("stop_reason")
        return f"stopped: {reason}" if reason else "finished"
    newest = max((float(series.times[-1]) for series in run.series.values()), default=0.0)
    return f"no end recorded, last logged {duration(max(time.time() - newest, 0))} ago"


def _clock_time(seconds: Any) -> str:
    if not isinstance(seconds, (int, float)):
        return ""
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
