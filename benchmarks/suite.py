"""Runs the benchmarks one after another and leaves a report of each: what `make bench` does.

python benchmarks/suite.py [NAME ...] [--output build/bench] [--original-python ENVIRONMENT/bin/python]

Without names all of them, about an hour on two cores; the machine should be idle. A report has the machine, the
versions, the commit, the command line, what was printed (full configurations where a run is measured), how long it
took and how it ended. One that misses its target or fails does not keep the others from running; the exit status is 1
then. What needs a GPU is left out where there is none, and said so.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measuring.surroundings import surroundings  # noqa: E402

FOLDER = ROOT / "benchmarks"
NEEDS_A_GPU = ("gpu_check", "gpu_numerics")
LIMIT_SECONDS = 3600.0
"""Of one benchmark."""


@dataclass(frozen=True)
class Ended:
    """How one benchmark ended."""

    name: str
    verdict: str
    seconds: float
    fine: bool


def names() -> list[str]:
    """All benchmarks, in the order of the alphabet."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "suite", "promises"))


def has_gpu() -> bool:
    """Without importing torch."""
    return Path("/proc/driver/nvidia").is_dir() or Path("/dev/kfd").exists()


def words_of(name: str, original_python: Path | None) -> list[str]:
    """The command line of a benchmark."""
    further = ["--original-python", str(original_python)] if name == "speed" and original_python is not None else []
    return [sys.executable, str(FOLDER / f"{name}.py"), *further]


def run(name: str, words: list[str], output: Path) -> Ended:
    """Run one, write its report."""
    began = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": str(not has_gpu()).lower()}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=LIMIT_SECONDS, check=False
        )
        printed, complaints, verdict = done.stdout, done.stderr, "fine" if done.returncode == 0 else "missed or failed"
    except subprocess.TimeoutExpired as error:
        printed, complaints, verdict = str(error.stdout or ""), "", f"not done after {LIMIT_SECONDS:.0f} s"
    seconds = time.perf_counter() - began
    command = " ".join(["python", f"benchmarks/{name}.py", *words[2:]])
    lines = [f"# {name}", "", *surroundings(), f"- command: `{command}`", f"- took {seconds:.0f} s: {verdict}", ""]
    lines += [printed.strip(), ""]
    if verdict != "fine":
        lines += ["## The end of what it complained of", "", "```text", complaints[-4000:].strip(), "```", ""]
    (output / f"{name}.md").write_text("\n".join(lines))
    return Ended(name, verdict, seconds, verdict == "fine")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of files in benchmarks/, without .py")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--original-python", type=Path, help="for `speed`; see there")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(names())):
        parser.error(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(names())}")
    options.output.mkdir(parents=True, exist_ok=True)
    ended: list[Ended] = []
    for name in options.names or names():
        if name in NEEDS_A_GPU and not has_gpu():
            print(f"{name}: left out, no GPU here", flush=True)
            continue
        ended.append(run(name, words_of(name, options.original_python), options.output))
        print(f"{name}: {ended[-1].verdict}, {ended[-1].seconds:.0f} s: {options.output / name}.md", flush=True)
    return 0 if all(one.fine for one in ended) else 1


if __name__ == "__main__":
    sys.exit(main())
