"""One card in less than eight minutes: is every path right, and how fast is each way to train OLMo-2 on it?

python benchmarks/gpu_check.py [--device cuda] [--size full] [--seconds 470] [--only WORD ...] [--output FILE.md]

First `gpu_numerics.py`, then training steps at sequence length 4,096 in bfloat16: OLMo-2 1B by choice of attention,
loss and compilation, beside transformers' Olmo2 in the same loop, and `train_hf.py` itself; last 7B with one layer and
with two, from which the whole model is scaled up. Each is a process with a time limit; what cannot be had here, or
did not come in time, is named with the reason. `--device cpu --size tiny` runs all of it on a laptop.
Targets: MFU of 50 % (1B, compiled), and no slower than transformers' Olmo2 with the same choice.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.measuring.surroundings import surroundings  # noqa: E402

STEP = ROOT / "benchmarks" / "measuring" / "gpu_step.py"
NUMERICS = ROOT / "benchmarks" / "gpu_numerics.py"
NUMERICS_SECONDS, CHOICE_SECONDS = 150.0, 75.0
"""At most, each."""
LEAST_SECONDS = 15.0
"""Below this nothing more is started."""
MFU_TARGET = 0.50
WHOLE_LAYERS = {"7b": 32, "tiny": 4}
"""Of the model that is scaled up from one layer and two."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    model: str
    attention: str
    loss: str
    compile: str
    layers: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        return f"{'7B scaled up, ' if self.layers else ''}{self.model}"

    @property
    def words(self) -> str:
        return " ".join([self.label, self.attention, self.loss, self.compile])


ROWS = [  # what matters most comes first, for time may run out
    Row("transformers", "sdpa", "plain", "no"),
    Row("ours", "sdpa", "chunked", "no"),
    Row("ours", "sdpa", "chunked", "layers"),
    Row("transformers", "sdpa", "plain", "model"),
    Row("train_hf.py", "auto", "auto", "no"),
    Row("ours", "flash_attention_2", "chunked", "no"),
    Row("ours", "flash_attention_2", "liger", "layers"),
    Row("ours", "sdpa", "auto", "no", layers=(1, 2)),
    Row("ours", "sdpa", "plain", "no"),
    Row("ours", "sdpa", "flash", "no"),
    Row("ours", "sdpa", "liger", "no"),
    Row("ours", "sdpa", "plain", "model"),
    Row("ours", "flex_attention", "chunked", "no"),
    Row("train_hf.py", "auto", "auto", "model"),
]


def numerics(options: argparse.Namespace, seconds: float) -> list[str]:
    """The verdict of `gpu_numerics.py` on every path, in two lines."""
    words = [sys.executable, str(NUMERICS), "--device", options.device]
    words += ["--shapes", "heads of 128", "--precisions", "fp32", "bf16 autocast"] if options.size == "tiny" else []
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, env=environment(options))
    except subprocess.TimeoutExpired:
        return [f"numerics: not done after {seconds:.0f} s"]
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if "TOO FAR" in line]
    missing = [line for line in lines if line.startswith("not here:")]
    verdict = lines[-1] if lines else done.stderr.strip().splitlines()[-1]
    return [f"numerics: {verdict}", *missing, *wrong]


def environment(options: argparse.Namespace) -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": str(ROOT), "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return found | ({"ACCELERATE_USE_CPU": "true"} if options.device == "cpu" else {})


def time_row(row: Row, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What `gpu_step.py` says of a row, within the time."""
    size = options.size if options.size == "tiny" else "7b" if row.layers else "1b"
    request = {
        "model": row.model,
        "size": size,
        "device": options.device,
        "attention": row.attention,
        "loss": row.loss,
        "compile": row.compile,
        "backend": options.backend,
        "layers": row.layers,
    }
    words = [sys.executable, str(STEP), json.dumps(request)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds, env=environment(options))
    except subprocess.TimeoutExpired:
        return {"skipped": f"not done after {seconds:.0f} s"}
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        said = done.stderr.rpartition("\nerror: ")[2].split()  # all of it where the error is not one for people
        return {"skipped": f"ended with {done.returncode}: {' '.join(said)[-200:]}"}
    result: dict[str, Any] = json.loads(found[-1].removeprefix("RESULT "))
    return result


def scaled_up(found: list[dict[str, Any]], layers: int) -> dict[str, Any]:
    """From one layer and two to all: each further one costs what the second did."""
    one, two = found
    keys = ("seconds", "peak_bytes", "flops_per_token")
    return one | {key: one[key] + (layers - 1) * (two[key] - one[key]) for key in keys}


def line_of(row: Row, found: dict[str, Any]) -> str:
    """A line of the table."""
    tokens_per_second = found["tokens"] / found["seconds"]
    peak = found["peak_flops"]
    mfu = "" if peak is None else f"{found['flops_per_token'] * tokens_per_second / peak:.1%}"
    cells = [row.label, row.attention, row.loss, row.compile, f"{found['seconds']:.3f}", f"{tokens_per_second:,.0f}"]
    return "| " + " | ".join([*cells, mfu, f"{found['peak_bytes'] / 1e9:.1f}"]) + " |"


def verdicts(timed: dict[Row, dict[str, Any]]) -> list[str]:
    """What the targets say."""
    lines = []
    shares = {
        row: f["flops_per_token"] * f["tokens"] / f["seconds"] / f["peak_flops"]
        for row, f in timed.items()
        if f["peak_flops"] is not None and row.compile != "no" and row.model != "transformers"
    }
    if shares:
        best = max(shares, key=lambda row: shares[row])
        lines.append(f"best MFU, compiled: {shares[best]:.1%} ({best.words}); target {MFU_TARGET:.0%}")
    for compile in ("no", "model"):
        rivals = [f["seconds"] for row, f in timed.items() if row.model == "transformers" and row.compile == compile]
        ours = [
            f["seconds"]
            for row, f in timed.items()
            if (row.model, row.attention, row.layers) == ("ours", "sdpa", ())
            and (row.compile == "no") == (compile == "no")
        ]
        if rivals and ours:
            kind = "not compiled" if compile == "no" else "compiled"
            ratio = min(ours) / rivals[0]
            lines.append(f"ours / transformers' Olmo2, {kind}: {ratio:.3f} of its time; target 1.0")
    return lines


def chosen(row: Row, only: list[str] | None) -> bool:
    return not only or all(word in row.words for word in only)


def card(options: argparse.Namespace) -> str:
    """What is checked; asked for in a process of its own, for this one shall not hold memory of the card.

    Raises:
        SystemExit: there is no such device, or no torch.
    """
    if options.device == "cpu":
        return "card: none"
    code = "import torch; c = torch.cuda; p = c.get_device_properties(0);"
    code += "print(f'{p.name}, {p.total_memory / 1e9:.0f} GB, CUDA {torch.version.cuda}')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(options))
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SystemExit(
            f"no CUDA device can be used here ({reason}); --device cpu --size tiny tries the script itself"
        )
    return f"card: {done.stdout.strip()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--size", default="full", choices=["full", "tiny"])
    parser.add_argument("--seconds", type=float, default=470.0, help="for everything")
    parser.add_argument("--only", nargs="+", help="only rows with all these words")
    parser.add_argument("--skip-numerics", action="store_true")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--output", type=Path, help="write the report to this file too")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    lines: list[str] = []

    def say(*further: str) -> None:  # at once, so that nothing is lost to whoever ends this
        lines.extend(further)
        print(*further, sep="\n", flush=True)

    say("# One card", "", *surroundings(), f"- {card(options)}", "")
    if not options.skip_numerics:
        say(*numerics(options, min(NUMERICS_SECONDS, options.seconds)), "")
    say("| model | attention | loss | compiled | s per step | tokens/s | MFU | peak GB |", "|---|" + "---|" * 7)
    timed: dict[Row, dict[str, Any]] = {}
    skipped = []
    for row in (row for row in ROWS if chosen(row, options.only)):
        left = end - time.monotonic()
        result = time_row(row, options, min(CHOICE_SECONDS, left)) if left > LEAST_SECONDS else {"skipped": "no time"}
        if "skipped" in result:
            skipped.append(f"- {row.words}: {result['skipped']}")
            continue
        found = result["found"]
        whole = WHOLE_LAYERS["tiny" if options.size == "tiny" else "7b"]
        timed[row] = scaled_up(found, whole) if row.layers else found[0]
        say(line_of(row, timed[row]))
    say("", *verdicts(timed))
    if skipped:
        say("", "Left out:", *skipped)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text("\n".join(lines) + "\n")
    return 0 if timed else 1


if __name__ == "__main__":
    sys.exit(main())
