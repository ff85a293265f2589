"""A training step of ours against its rivals on the same work, in one run, in turns.

python benchmarks/speed.py [S M] [--rivals floor bare hf_trainer ours] [--steps 5] [--rounds 2]

Each rival is a process of its own (`benchmarks/rivals/`): the matrix products of the step alone (`floor`), a bare loop
with transformers' Olmo2 (`bare`, and `bare_compiled`), Hugging Face's `Trainer` (`hf_trainer`), and `train_hf.py`
(`ours`). Printed are the medians of the steady steps of all rounds, their spread, and the ratios with what is aimed
at. The machine should be idle.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RIVALS = ROOT / "benchmarks" / "rivals"
sys.path[:0] = [str(ROOT), str(RIVALS)]

from workloads import WORKLOADS, write_tokens  # noqa: E402

WARM_UP_STEPS = 1
TARGETS = {  # ours / rival, at most
    ("S", "floor"): 1.20,
    ("M", "floor"): 1.08,
    ("S", "bare"): 0.92,
    ("M", "bare"): 0.92,
    ("S", "hf_trainer"): 0.86,
    ("M", "hf_trainer"): 0.86,
}
PEAK_TARGET = 0.80
"""Peak resident memory of ours / of the bare loop, at most."""


@dataclass
class Measured:
    """What a rival showed over all rounds."""

    seconds: list[float] = field(default_factory=list)  # of steady steps
    peak_bytes: list[int] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the extremes, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / 2 / self.median


def run_rival(rival: str, workload: str, folder: Path, *, steps: int) -> tuple[list[float], int]:
    """Steady seconds and peak bytes of one process of a rival."""
    compiled = rival.endswith("_compiled")
    script = RIVALS / f"{rival.removesuffix('_compiled')}.py"
    words = [sys.executable, str(script), workload, "--steps", str(steps), "--folder", str(folder)]
    environment = {**os.environ, "PYTHONPATH": f"{RIVALS}:{ROOT}", "ACCELERATE_USE_CPU": "true"}
    environment.pop("OMP_NUM_THREADS", None)
    done = subprocess.run(words + ["--compile"] * compiled, env=environment, capture_output=True, text=True, cwd=ROOT)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode != 0 or not found:
        raise SystemExit(
            f"{' '.join(words)} failed ({done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    result = json.loads(found[0].removeprefix("RESULT "))
    return result["seconds"][WARM_UP_STEPS:], result["peak_bytes"]


def measure(workload: str, rivals: list[str], options: argparse.Namespace) -> dict[str, Measured]:
    """All rivals in turns, the order reversed every other round."""
    found = {rival: Measured() for rival in rivals}
    for turn in range(options.rounds):
        for rival in rivals if turn % 2 == 0 else rivals[::-1]:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                write_tokens(WORKLOADS[workload], folder / "tokens.npy", steps=options.steps)
                seconds, peak = run_rival(rival, workload, folder, steps=options.steps)
            found[rival].seconds += seconds
            found[rival].peak_bytes.append(peak)
            sys.stderr.write(f"{workload} round {turn + 1} {rival}: {statistics.median(seconds):.3f} s\n")
    return found


def table(workload: str, found: dict[str, Measured]) -> list[str]:
    """The result as lines of Markdown."""
    lines = [
        f"## {workload}: {WORKLOADS[workload]}",
        "",
        "| | s per step | spread | ours / this | target | peak MB | ours / this |",
        "|---|---|---|---|---|---|---|",
    ]
    ours = found.get("ours")
    for rival, measured in found.items():
        ratio = peak_ratio = target = ""
        if ours is not None and rival != "ours":
            ratio = f"{ours.median / measured.median:.3f}"
            peak_ratio = f"{max(ours.peak_bytes) / max(measured.peak_bytes):.2f}"
            target = f"{TARGETS.get((workload, rival), '')}"
        peak = max(measured.peak_bytes) / 1e6
        lines.append(
            f"| {rival} | {measured.median:.3f} | ±{100 * measured.spread:.1f} % | {ratio} | {target} | {peak:,.0f} | "
            f"{peak_ratio} |"
        )
    return [*lines, ""]


def surroundings() -> list[str]:
    """Hardware, versions and commit, without which a figure means nothing."""
    import torch
    import transformers

    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    return [
        f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads; Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}; commit {commit.strip() or 'unknown'}",
        "",
        f"Peak memory of ours against the bare loop's: at most {PEAK_TARGET}.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["S", "M"], help="of S, M, none")
    parser.add_argument("--rivals", nargs="+", default=None)
    parser.add_argument("--steps", type=int, default=5, help=f"per process, of which {WARM_UP_STEPS} to warm up")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the tables to this file too")
    options = parser.parse_args()
    rivals = options.rivals or ["floor", "bare", "hf_trainer", "ours"]
    lines = surroundings()
    for workload in options.workloads:
        lines += table(workload, measure(workload, rivals, options))
    sys.stdout.write("\n".join(lines) + "\n")
    if options.output is not None:
        options.output.write_text("# Speed of a training step\n\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
