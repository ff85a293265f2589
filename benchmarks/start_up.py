"""From the command to the first thing that happens: help, an import, the first step of the quickstart's run.

python benchmarks/start_up.py [--rounds 5] [--launches 2] [--modules]

Medians by the clock, each time in a new process, after one that fills the disk's cache. The first step is that of
`configs/tiny/cpu.yaml` on a little text prepared here, launched as the README says and by Python alone; it counts when
its line is in `metrics.jsonl`. `--modules` lists what the first launch imports longest.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measuring.surroundings import surroundings  # noqa: E402

BIN = Path(sys.executable).parent
TINY = ROOT / "configs" / "tiny" / "cpu.yaml"
LAUNCHERS = {
    "accelerate launch": [
        str(BIN / "accelerate"),
        "launch",
        "--config_file",
        str(ROOT / "accelerate_configs" / "cpu.yaml"),
    ],
    "python": [sys.executable],
}
HELP_TARGET, IMPORT_TARGET, STEP_TARGET = 0.5, 0.3, 10.0
"""Seconds."""
HEAVY = ("torch", "transformers", "datasets", "numpy")


def environment() -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    found.pop("OMP_NUM_THREADS", None)
    return found


def seconds_of(words: Sequence[str], rounds: int) -> list[float]:
    """Of a process from its start to its end; one more goes before that does not count."""
    found = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        subprocess.run(words, env=environment(), stdout=subprocess.DEVNULL, check=True)
        found.append(time.perf_counter() - began)
    return found[1:]


def heavy_modules(code: str) -> list[str]:
    """Which of the heavy packages are there after this code."""
    words = [
        sys.executable,
        "-c",
        f"{code}\nimport sys\nimport json\nprint(json.dumps([n for n in {HEAVY!r} if n in sys.modules]))",
    ]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def prepare(folder: Path) -> list[str]:
    """A little text and its tokenizer; the settings that let the tiny run read it."""
    text = Path(os.__file__).parent / "asyncio"
    words = [str(BIN / "olmo-hf"), "prepare-data", str(text), "--pattern", "*.py", "--train-tokenizer", "1024"]
    words += ["--validation-fraction", "0.1", "--output", str(folder / "data")]
    subprocess.run(words, env=environment(), stdout=subprocess.DEVNULL, check=True)
    return [
        f"--data.paths=[{folder}/data/train/*.npy]",
        f"--model.tokenizer={folder}/data/tokenizer",
        "--evaluation.evaluators=[]",
        "--training.stop_after=1",
        "--training.save_interval=null",
        "--training.save_interval_ephemeral=null",
    ]


def first_step(launcher: Sequence[str], settings: Sequence[str], output: Path) -> float:
    """Seconds from launch until the first step is on record; the process is waited for."""
    metrics = output / "metrics.jsonl"
    words = [*launcher, str(ROOT / "train_hf.py"), str(TINY), *settings, f"--training.output_dir={output}"]
    log = output.with_suffix(".log").open("w+")
    began = time.perf_counter()
    process = subprocess.Popen(words, env=environment(), stdout=log, stderr=subprocess.STDOUT)
    taken = 0.0
    while process.poll() is None and taken == 0.0:
        if metrics.is_file() and "train/CrossEntropyLoss" in metrics.read_text():
            taken = time.perf_counter() - began
        time.sleep(0.005)
    if process.wait() != 0 or taken == 0.0:
        log.seek(0)
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}:\n{log.read()[-4000:]}")
    log.close()
    return taken


def longest_imports(settings: Sequence[str], output: Path) -> list[str]:
    """The modules whose own code takes longest, of a dry run."""
    words = [sys.executable, "-X", "importtime", str(ROOT / "train_hf.py"), str(TINY), *settings, "--dry_run"]
    words.append(f"--training.output_dir={output}")
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=True)
    rows = [line.removeprefix("import time:").split("|") for line in done.stderr.splitlines() if "|" in line]
    timed = [(int(own), name.strip()) for own, _, name in (r for r in rows if len(r) == 3) if own.strip().isdigit()]
    timed.sort(reverse=True)
    whole = f"{sum(own for own, _ in timed) / 1e6:.2f} s in {len(timed):,} modules"
    return [f"imports of a dry run: {whole}", *(f"  {own / 1e3:7.1f} ms  {name}" for own, name in timed[:30])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of help and import")
    parser.add_argument("--launches", type=int, default=2, help="of the run, by each launcher")
    parser.add_argument("--modules", action="store_true")
    options = parser.parse_args()
    rows: list[tuple[str, list[float], float | None]] = []
    rows.append(("python -c pass", seconds_of([sys.executable, "-c", "pass"], options.rounds), None))
    rows.append(("olmo-hf --help", seconds_of([str(BIN / "olmo-hf"), "--help"], options.rounds), HELP_TARGET))
    imported = seconds_of([sys.executable, "-c", "import olmo_hf"], options.rounds)
    rows.append(("python -c 'import olmo_hf'", imported, IMPORT_TARGET))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = prepare(folder)
        for launcher, words in LAUNCHERS.items():
            taken = [first_step(words, settings, folder / f"{launcher}-{i}") for i in range(options.launches + 1)]
            rows.append((f"{launcher} train_hf.py configs/tiny/cpu.yaml, first step", taken[1:], STEP_TARGET))
        modules = longest_imports(settings, folder / "dry") if options.modules else []
    print("\n".join(surroundings()), "\n\n| launch | median s | slowest s | target s |\n|---|---|---|---|")
    missed = False
    for what, seconds, target in rows:
        median = statistics.median(seconds)
        missed |= target is not None and median > target
        print(f"| {what} | {median:.3f} | {max(seconds):.3f} | {'' if target is None else target} |")
    loaded = heavy_modules("import olmo_hf"), heavy_modules("from olmo_hf.cli.main import main; main(['--help'])")
    print(f"\nof {', '.join(HEAVY)}: `import olmo_hf` loads {loaded[0]}, `olmo-hf --help` {loaded[1]}")
    print("\n".join(modules))
    return 1 if missed or any(loaded) else 0


if __name__ == "__main__":
    sys.exit(main())
