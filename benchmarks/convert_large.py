"""Memory of `olmo-hf convert` for a checkpoint with the tensors of a 13B model, both ways.

python benchmarks/convert_large.py [--preset olmo2_13b] [--layers 2] [--dtype bfloat16] [--one-way] [--directory DIR]

The checkpoint is synthetic: the original's model.pt, all zeros, so that it takes no room on the disk; what is written
from it does. Its tensors and layers are as large as those of the preset, there are only fewer layers: with
`--layers 40 --dtype bfloat16 --one-way` it is the whole model, which needs 26 GiB. Reported is the peak of each
conversion, verification by logits included: own memory, and resident memory with the pages of mapped files, which the
system takes back when it needs them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

CONVERT = """
import json, sys, threading, time
from pathlib import Path

def status(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

import olmo_hf.model.conversion.convert
from olmo_hf.cli.main import main
before = peak = status("RssAnon")

def watch():
    global peak
    while True:
        peak = max(peak, status("RssAnon"))
        time.sleep(0.005)

threading.Thread(target=watch, daemon=True).start()
start = time.perf_counter()
assert main(["convert", *sys.argv[1:]]) == 0
print(json.dumps({"own": peak - before, "resident": status("VmHWM"), "seconds": time.perf_counter() - start}))
"""


def write_source(directory: Path, preset: str, layers: int) -> tuple[int, int]:
    """A checkpoint of zeros that lies in holes of its file; returns bytes of all tensors and of the largest."""
    from omegaconf import OmegaConf

    from olmo_hf.model.configuration_olmo import OlmoHfConfig
    from olmo_hf.model.conversion.architecture import config_to_original
    from olmo_hf.model.conversion.tensor_names import tensor_table
    from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
    from olmo_hf.model.presets import preset_fields

    config = OlmoHfConfig(**(preset_fields(preset) | {"num_hidden_layers": layers}))
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in OlmoHfForCausalLM(config).named_parameters()}
    weights = {
        entry.original: torch.empty(sum(entry.rows), *shapes[entry.ours[0]][1:]) for entry in tensor_table(config)
    }
    directory.mkdir()
    OmegaConf.save(OmegaConf.create({"model": config_to_original(config)}), directory / "config.yaml")
    with torch.serialization.skip_data():  # no number is written, none of this memory is ever touched
        torch.save(weights, directory / "model.pt")
    sizes = [4 * tensor.numel() for tensor in weights.values()]
    return sum(sizes), max(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="olmo2_13b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights written")
    parser.add_argument("--one-way", action="store_true", help="from the original only, not back to it")
    parser.add_argument("--directory", type=Path, help="where there is room for twice the checkpoint; left out: /tmp")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name)
        total, largest = write_source(folder / "original", options.preset, options.layers)
        gib = 2**30
        print(f"{options.preset}, {options.layers} layers: {total / gib:.2f} GiB, largest {largest / gib:.2f} GiB")
        ways = [("original", "huggingface", ["--dtype", options.dtype])]
        if not options.one_way:
            ways.append(("huggingface", "back", ["--original-format", "pt"]))
        for source, target, words in ways:
            command = [sys.executable, "-c", CONVERT, str(folder / source), str(folder / target), *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise SystemExit(done.stderr)
            found = json.loads(done.stdout.strip().splitlines()[-1])
            beyond = (found["own"] - largest) / gib
            print(
                f"{source} -> {target}: {found['own'] / gib:.2f} GiB of own memory, {beyond:+.2f} GiB to the largest "
                f"tensor; {found['resident'] / gib:.2f} GiB resident; {found['seconds']:.0f} s"
            )


if __name__ == "__main__":
    main()
