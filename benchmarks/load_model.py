"""Time and memory of `from_pretrained` for one checkpoint: this package's class and the stock one, in turns.

python benchmarks/load_model.py [--preset olmo2_1b] [--repeats 3] [--checkpoint DIR]

Each load is a process of its own; the order alternates, so that neither profits from the other's file cache. Peak
memory counts what is mapped from the file too, after every weight was touched, beyond what was needed before loading.
With `--checkpoint` the random checkpoint is written there and kept, or used if it is there already.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

LOAD = """
import json, sys, time
from pathlib import Path

def peak_bytes():  # of this program only; getrusage would count the parent's share before exec
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

if sys.argv[2] == "olmo_hf":
    from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM as model_class
else:
    from transformers import Olmo2ForCausalLM as model_class
import torch
before = peak_bytes()
start = time.perf_counter()
model = model_class.from_pretrained(sys.argv[1])
seconds = time.perf_counter() - start
checksum = sum(p.sum(dtype=torch.float64).item() for p in model.parameters())  # touches every weight
print(json.dumps({"seconds": seconds, "peak_bytes": peak_bytes() - before, "checksum": checksum}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="olmo2_1b")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()

    from olmo_hf.model.args import ModelArgs
    from olmo_hf.model.build import build_model

    results: dict[str, list[dict[str, float]]] = {"olmo_hf": [], "transformers": []}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) if options.checkpoint is None else options.checkpoint
        if not (directory / "config.json").is_file():
            build_model(ModelArgs(preset=options.preset), seed=0).save_pretrained(directory)
        size_bytes = sum(path.stat().st_size for path in directory.iterdir())
        for repeat in range(options.repeats):
            for who in list(results)[:: 1 if repeat % 2 == 0 else -1]:
                command = [sys.executable, "-c", LOAD, str(directory), who]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                results[who].append(json.loads(done.stdout.strip().splitlines()[-1]))
    sums = {row["checksum"] for found in results.values() for row in found}
    assert len(sums) == 1, "the two loaded other weights"
    print(f"{options.preset}: {size_bytes / 2**20:,.0f} MiB on disk, best of {options.repeats}")
    for who, found in results.items():
        seconds, peak = min(row["seconds"] for row in found), min(row["peak_bytes"] for row in found)
        print(f"{who:>12}: {seconds:.2f} s, {peak / 2**20:,.0f} MiB")


if __name__ == "__main__":
    main()
