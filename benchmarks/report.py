"""What a report of a very long run costs: time to make it, its size, and how soon a browser shows it.

python benchmarks/report.py [--rows 1000000] [--metrics 25]

Targets for 1,000,000 logged steps: under 20 MB, and open in under 3 seconds (headless Chromium from the system's
packages; from its start to the page that says it is drawn, and the same for an empty page beside it).
"""

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

NAMES = ("train/CrossEntropyLoss", "train/ZLoss", "train/Perplexity", "optim/total_grad_norm", "optim/clipping_rate")
NAMES += ("optim/learning_rate_group0", "throughput/device/tokens_per_second", "throughput/device/mfu")
NAMES += ("throughput/total_tokens", "System/Peak Memory (MB)", "System/Peak Process Memory (MB)")
PHASES = ("data", "forward_backward", "optimizer", "logging", "evaluation", "checkpoint")
NAMES += tuple(f"throughput/time_share/{phase}" for phase in PHASES)


def write_run(directory: Path, rows: int, metrics: int) -> None:
    """A record of so many logged steps with evaluations, checkpoints, restarts and spikes."""
    directory.mkdir()
    names = [*NAMES, *(f"train/source/{i}/CrossEntropyLoss" for i in range(metrics - len(NAMES)))]
    noise = np.random.default_rng(0).normal(0, 0.02, rows + 1)
    events = [{"step": 0, "tokens": 0, "time": 1.7e9, "event": "start", "max_steps": rows}]
    with open(directory / "metrics.jsonl", "w") as file:
        for step in range(1, rows + 1):
            loss = 2 + 8 * math.exp(-step / rows * 9) + float(noise[step])
            row: dict[str, Any] = {"step": step, "tokens": step * 4_194_304, "time": 1.7e9 + step}
            row |= {name: loss + i for i, name in enumerate(names)}
            file.write(json.dumps(row) + "\n")
            if step % (rows // 100) == 0:
                held_out = {"eval/c4/CrossEntropyLoss": loss, "eval/c4/Perplexity": math.exp(loss)}
                held_out["eval/downstream/hellaswag_len_norm"] = 1 - loss / 12
                file.write(json.dumps({key: row[key] for key in ("step", "tokens", "time")} | held_out) + "\n")
                stamp = {key: row[key] for key in ("step", "tokens", "time")}
                events.append({**stamp, "event": "checkpoint"})
            if step % (rows // 20) == rows // 40:
                events.append({"step": step, "tokens": 0, "time": 1.7e9 + step, "event": "loss_spike", "loss": 9.0})
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def seconds_to_show(page: Path, browser: str, directory: Path) -> tuple[float, float, bool]:
    """Wall and processor seconds from the start of the browser to the drawn page, and whether it says it is drawn."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={directory / 'profile'}", "--window-size=1400,900", "--dump-dom", page.as_uri()]
    began, used = time.perf_counter(), processor_seconds()
    dom = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    return time.perf_counter() - began, processor_seconds() - used, 'data-ready="yes"' in dom


def processor_seconds() -> float:
    """Used by all processes that were started and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="logged steps")
    parser.add_argument("--metrics", type=int, default=25, help="metrics of a row")
    options = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    figures: dict[str, Any] = {"rows": options.rows, "metrics": options.metrics}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_run(directory / "run", options.rows, options.metrics)
        figures["record_megabytes"] = (directory / "run" / "metrics.jsonl").stat().st_size / 1e6
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "olmo_hf.cli.main", "report", str(directory / "run")],
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
        )
        figures["report_seconds"] = time.perf_counter() - began
        figures["peak_megabytes"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
        page = directory / "run" / "report.html"
        figures["page_megabytes"] = page.stat().st_size / 1e6
        if browser is not None:
            empty = directory / "empty.html"
            empty.write_text("<!doctype html><title>x</title>")
            seconds_to_show(empty, browser, directory)  # makes the profile
            figures["empty_page_seconds"] = min(seconds_to_show(empty, browser, directory)[0] for _ in range(3))
            shown = [seconds_to_show(page, browser, directory) for _ in range(3)]
            figures["page_seconds"] = [seconds for seconds, _, _ in shown]
            figures["page_processor_seconds"] = [seconds for _, seconds, _ in shown]
            figures["drawn"] = all(ready for _, _, ready in shown)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
