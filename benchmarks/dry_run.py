"""Every shipped configuration planned on this machine: seconds, parameters and steps, against the published numbers.

python benchmarks/dry_run.py [--only olmo2_7b]

Runs `train_hf.py CONFIG --dry_run --skip_data` once for each file below configs/, one after the other, each in a
process of its own; the seconds are those of the whole command, imports included: by the clock, and of the processor,
which is what the command takes on a machine that does nothing else. Ends with status 1 if a run takes 20 processor
seconds or more, fails, or has another number of parameters or steps than published. No GPU and no network is needed.
"""

import argparse
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 20

# Parameters with embeddings, and last optimizer step, as published; stage 2 without the ten steps at a learning rate
# of 0 with which the trainer of that time went on.
PUBLISHED: dict[str, tuple[int | None, int | None]] = {
    "olmo2_1b/stage1": (1_484_916_736, 1_907_359),
    "olmo2_1b/stage2_seed42": (1_484_916_736, 23_842),
    "olmo2_1b/stage2_seed666": (1_484_916_736, 23_842),
    "olmo2_1b/stage2_seed42069": (1_484_916_736, 23_842),
    "olmo2_7b/stage1": (7_298_617_344, 928_646),
    "olmo2_7b/stage2_seed42": (7_298_617_344, 11_921),
    "olmo2_7b/stage2_seed666": (7_298_617_344, 11_921),
    "olmo2_7b/stage2_seed42069": (7_298_617_344, 11_921),
    "olmo2_13b/stage1": (13_716_198_400, 596_057),
    "olmo2_13b/stage2_seed1110_100b": (13_716_198_400, 11_921),
    "olmo2_13b/stage2_seed2662_100b": (13_716_198_400, 11_921),
    "olmo2_13b/stage2_seed6209_100b": (13_716_198_400, 11_921),
    "olmo2_13b/stage2_seed2662_300b": (13_716_198_400, 35_763),
    "olmo1/olmo1_1b": (1_176_764_416, 739_328),
    "olmo1/olmo1_7b": (6_888_095_744, None),
    "half_billion/four_a100": (502_230_528, 9_537),
}


def plan_of(config: Path) -> tuple[float, float, dict[str, str], str]:
    """Seconds by the clock and of the processor, rows of the table, and what was said if it failed."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "train_hf.py", str(config), "--dry_run", "--skip_data"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in found.stdout.splitlines() if "  " in line)
    return seconds, processor, rows, "" if found.returncode == 0 else found.stderr.strip().splitlines()[-1]


def number_before(word: str, text: str) -> int:
    """The number that stands before a word: `7,298,617,344 parameters`."""
    found = re.search(rf"([\d,]+) {word}", text)
    return int(found[1].replace(",", "")) if found else -1


def main() -> int:
    """Plan, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="files whose path contains this")
    options = parser.parse_args()
    wrong = 0
    print(f"{'configuration':<36}{'seconds':>8}{'processor':>11}{'parameters':>16}{'steps':>12}{'tokens a step':>16}")
    for config in sorted((ROOT / "configs").rglob("*.yaml")):
        name = str(config.relative_to(ROOT / "configs").with_suffix(""))
        if options.only not in name:
            continue
        seconds, processor, rows, error = plan_of(config)
        if error:
            print(f"{name:<36}{seconds:8.1f}  failed: {error}")
            wrong += 1
            continue
        parameters = number_before("parameters", rows["model"])
        steps = number_before("steps", rows["this launch stops at"])
        tokens = number_before("tokens", rows["batch"])
        expected = PUBLISHED.get(name, (None, None))
        notes = [
            f"published: {want:,}"
            for want, have in zip(expected, (parameters, steps), strict=True)
            if want not in (None, have)
        ]
        notes += [f"over {LIMIT_SECONDS} s"] if processor >= LIMIT_SECONDS else []
        wrong += bool(notes)
        said = "; ".join(notes) if notes else ("as published" if name in PUBLISHED else "")
        print(
            f"{name:<36}{seconds:8.1f}{processor:11.1f}{parameters:>16,}{steps:>12,}{tokens:>16,}  {said}", flush=True
        )
    print("all as they should be" if wrong == 0 else f"{wrong} are not as they should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
