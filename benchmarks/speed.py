"""A training step of ours against its rivals on the same work, in one run, in turns.

python benchmarks/speed.py [S M] [--rivals floor bare hf_trainer own_loop ours] [--steps 5] [--rounds 2]
    [--original-python ENVIRONMENT/bin/python]

Each rival is a process of its own (`benchmarks/rivals/`): the matrix products of the step alone (`floor`), a bare loop
with transformers' Olmo2 (`bare`, and `bare_compiled`), Hugging Face's `Trainer` (`hf_trainer`), the original package's
trainer (`original`), a bare loop over our own model, loss and optimizer (`own_loop`), and the README's launch line
(`ours`). Printed are the medians of the steady steps of all rounds, their spread, and the ratios with targets.
The machine should be idle. The work `none` has almost no arithmetic: what it takes is the loop.

The original needs older packages than ours, hence an environment of its own; without one its row is left out. To make
one (the second line brings the same torch as ours, `sed -n 's/^torch==//p' constraints.txt`):

python3.11 -m venv ENVIRONMENT
ENVIRONMENT/bin/pip install torch==2.13.0
ENVIRONMENT/bin/pip install ai2-olmo==0.6.0 safetensors torchmetrics scikit-learn datasets
"""

import argparse
import json
import os
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

from benchmarks.measuring.surroundings import surroundings  # noqa: E402

WARM_UP_STEPS = 1
TARGETS = {  # ours / rival, at most
    ("S", "floor"): 1.20,
    ("M", "floor"): 1.08,
    ("S", "bare"): 0.92,
    ("M", "bare"): 0.92,
    ("S", "hf_trainer"): 0.86,
    ("M", "hf_trainer"): 0.86,
    ("S", "original"): 0.80,
    ("M", "original"): 0.80,
    ("S", "own_loop"): 1.02,
}
PEAK_TARGET = 0.80
"""Peak resident memory of ours / of the bare loop, at most."""


@dataclass
class Measured:
    """What a rival showed over all rounds."""

    seconds: list[float] = field(default_factory=list)  # of steady steps
    peak_bytes: list[int] = field(default_factory=list)
    settings: str = ""
    """All settings of the run, where the rival writes them down."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the extremes, as a share of the median."""
        return (max(self.seconds) - min(self.seconds)) / 2 / self.median


def run_rival(rival: str, workload: str, folder: Path, options: argparse.Namespace) -> tuple[list[float], int]:
    """Steady seconds and peak bytes of one process of a rival."""
    compiled, is_foreign = rival.endswith("_compiled"), rival == "original"
    script = RIVALS / f"{rival.removesuffix('_compiled')}.py"
    python = options.original_python if is_foreign else sys.executable
    words = [str(python), str(script), workload, "--steps", str(options.steps), "--folder", str(folder)]
    path = str(RIVALS) if is_foreign else f"{RIVALS}:{ROOT}"
    environment = {**os.environ, "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true"}
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
                seconds, peak = run_rival(rival, workload, folder, options)
                if (written := folder / "ours" / "config.yaml").is_file():
                    found[rival].settings = written.read_text().replace(str(folder.resolve()), "FOLDER")
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
            f"| {rival} | {measured.median:.4f} | ±{100 * measured.spread:.1f} % | {ratio} | {target} | {peak:,.0f} | "
            f"{peak_ratio} |"
        )
    return [*lines, ""]


def settings_of(workload: str, found: dict[str, Measured]) -> list[str]:
    """The full configuration of our run, for the end of the report."""
    written = found["ours"].settings if "ours" in found else ""
    return [f"## All settings of ours on {workload}", "", "```yaml", written.rstrip(), "```", ""] if written else []


def chosen_rivals(options: argparse.Namespace) -> list[str]:
    """Who takes part; the original only where it was said how to run it."""
    rivals = options.rivals or ["floor", "bare", "hf_trainer", "original", "own_loop", "ours"]
    if options.original_python is None and "original" in rivals:
        if options.rivals:
            raise SystemExit(
                "original needs --original-python; the head of this file says how to make its environment"
            )
        rivals.remove("original")
    if "original" in rivals and not options.original_python.is_file():
        raise SystemExit(f"--original-python: found {options.original_python}, expected an interpreter (bin/python)")
    return rivals


def heading(rivals: list[str], options: argparse.Namespace) -> list[str]:
    """What was measured where, and who is missing."""
    lines = ["# Speed of a training step", "", *surroundings()]
    lines.append(f"- {os.cpu_count()} threads, {options.rounds} rounds of {options.steps} steps, rivals in turns")
    if "original" in rivals:
        words = [str(options.original_python), "-c", "import torch; print(torch.__version__)"]
        torch_there = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        lines.append(f"- original: ai2-olmo 0.6.0 with torch {torch_there}")
    else:
        lines.append("- the original's trainer is left out: `--original-python` was not given")
    return [*lines, "", f"Peak memory of ours against the bare loop's: at most {PEAK_TARGET}.", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["S", "M"], help="of S, M, none")
    parser.add_argument("--rivals", nargs="+", default=None)
    parser.add_argument("--steps", type=int, default=5, help=f"per process, of which {WARM_UP_STEPS} to warm up")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, help="write the tables to this file too")
    parser.add_argument("--original-python", type=Path, help="of an environment with the original package")
    options = parser.parse_args()
    rivals = chosen_rivals(options)
    lines, settings = heading(rivals, options), []
    for workload in options.workloads:
        found = measure(workload, rivals, options)
        lines += table(workload, found)
        settings += settings_of(workload, found)
    text = "\n".join([*lines, *settings])
    sys.stdout.write(text + "\n")
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text)


if __name__ == "__main__":
    main()
