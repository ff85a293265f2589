"""Resident memory of a long run: 2,000 steps of a tiny model with default callbacks, checkpoints and evaluations.

python benchmarks/flat_memory.py [--steps 2000]

The run is a process of its own whose memory is read from outside, every 20 ms; for every window of steps the median
counts. After the first quarter nothing may grow any more: target, the last window at most 1 % above that.
"""

import argparse
import bisect
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measuring.surroundings import surroundings  # noqa: E402
from tests import runs  # noqa: E402

WINDOWS = 10
ALLOWED_GROWTH = 0.01
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def write_long_run(directory: Path, steps: int) -> Path:
    """A run that saves, evaluates and logs all the way."""
    path = runs.write_run(
        directory,
        max_duration=steps,
        save_interval=max(steps // 10, 1),
        save_interval_ephemeral=max(steps // 40, 1),
        keep_unsharded=2,
    )
    settings = yaml.safe_load(path.read_text())
    settings["callbacks"] = {"speed_monitor": {}, "data_indices": {}, "console": {}}
    data = {"paths": settings["data"]["paths"], "token_dtype": "uint16", "sequence_length": 16, "shuffle": False}
    settings["evaluation"] = {
        "interval": max(steps // 20, 1),
        "evaluators": [{"label": "held-out", "type": "perplexity", "data": data}],
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def watch(config: Path) -> list[tuple[float, int]]:
    """Seconds since the epoch and resident bytes of a run, from its start to its end."""
    found = []
    process = runs.start(config)
    statistics_file = Path(f"/proc/{process.pid}/statm")
    while process.poll() is None:
        pages = int(statistics_file.read_text().split()[1] or 0)
        found.append((time.time(), pages * PAGE_BYTES))
        time.sleep(0.02)
    if process.returncode != 0:
        raise SystemExit((config.parent / "log.txt").read_text(errors="replace")[-4000:])
    return [(at, size) for at, size in found if size > 0]


def by_window(samples: list[tuple[float, int]], metrics: Path, steps: int) -> list[tuple[int, float]]:
    """Last step and median resident bytes of each window."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    ends = {row["step"]: row["time"] for row in rows if "train/CrossEntropyLoss" in row}
    times, result = [at for at, _ in samples], []
    for number in range(WINDOWS):
        first, last = number * steps // WINDOWS + 1, (number + 1) * steps // WINDOWS
        begin, end = bisect.bisect(times, ends[first]), bisect.bisect(times, ends[last])
        result.append((last, statistics.median(size for _, size in samples[begin : max(end, begin + 1)])))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", action="store_true", help="print the windows as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        config = write_long_run(Path(name), options.steps)
        samples = watch(config)
        windows = by_window(samples, Path(name) / "run" / "metrics.jsonl", options.steps)
        settings = (Path(name) / "run" / "config.yaml").read_text().replace(name, "FOLDER")
    settled, last = windows[WINDOWS // 4][1], windows[-1][1]
    growth = last / settled - 1
    if options.json:
        sys.stdout.write("RESULT " + json.dumps({"windows": windows, "growth": growth}) + "\n")
        return 0
    print("\n".join(surroundings()), "\n\n| up to step | resident MB |\n|---|---|")
    for step, size in windows:
        print(f"| {step:,} | {size / 1e6:,.1f} |")
    change = (last - settled) / 1e6
    print(f"\nfrom step {windows[WINDOWS // 4][0]:,} to {options.steps:,}: {change:+.1f} MB, {growth:+.2%}", end="")
    print(f" (allowed {ALLOWED_GROWTH:+.0%})\n\n## All settings\n\n```yaml\n{settings}```")
    return 0 if growth <= ALLOWED_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
