"""Conversion holds one tensor at a time."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from olmo_hf.errors import ConversionError
from olmo_hf.model.conversion.lazy import SafetensorsWriter, from_memory, from_safetensors, write_safetensors


def test_written_tensor_by_tensor_and_read_by_the_library(tmp_path):
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(2, 3).bfloat16(),
        "c": torch.tensor(7),
        "d": torch.empty(0, 5),
        "e": torch.randn(6, 4).T,
        "f": torch.tensor([True, False]),
    }
    write_safetensors(tmp_path / "x.safetensors", from_memory(tensors), lambda name: f"new.{name}")
    stored = load_file(tmp_path / "x.safetensors")
    assert stored.keys() == {f"new.{name}" for name in tensors}
    lazy = from_safetensors([tmp_path / "x.safetensors"])
    for name, tensor in tensors.items():
        assert torch.equal(stored[f"new.{name}"], tensor)
        assert torch.equal(lazy[f"new.{name}"].read(), tensor)
        assert (lazy[f"new.{name}"].shape, lazy[f"new.{name}"].dtype) == (tuple(tensor.shape), tensor.dtype)


def test_a_tensor_out_of_turn_or_missing_is_noticed(tmp_path):
    layout = {"a": ((2,), torch.float32), "b": ((2,), torch.float32)}
    with pytest.raises(AssertionError, match="not what comes next"), SafetensorsWriter(tmp_path / "x", layout) as out:
        out.write("b", torch.zeros(2))
    with pytest.raises(AssertionError, match="never written"), SafetensorsWriter(tmp_path / "x", layout) as out:
        out.write("a", torch.zeros(2))


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"12345678901234567890")
    with pytest.raises(ConversionError, match=r"x\.safetensors"):
        from_safetensors([tmp_path / "x.safetensors"])


# Own memory (not pages of mapped files) at its peak, looked at every few milliseconds.
MEASURE = """
import sys, threading, time
from pathlib import Path

def own_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024

import olmo_hf.model.conversion.convert
from olmo_hf.cli.main import main
before = peak = own_bytes()

def watch():
    global peak
    while True:
        peak = max(peak, own_bytes())
        time.sleep(0.003)

threading.Thread(target=watch, daemon=True).start()
assert main(["convert", *sys.argv[1:]]) == 0
print("peak", peak - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("direction", ["to huggingface", "to original as pt", "to original as safetensors"])
def test_memory_stays_near_the_largest_tensor(tmp_path, direction):
    """A checkpoint of 1 GB whose largest tensor has 50 MB is converted in less than three of those."""
    from olmo_hf.model.configuration_olmo import OlmoHfConfig
    from olmo_hf.model.conversion.architecture import config_to_original
    from olmo_hf.model.conversion.original_writing import OriginalContent, write_original
    from olmo_hf.model.conversion.tensor_names import tensor_table

    config = OlmoHfConfig(
        hidden_size=1024,
        intermediate_size=6144,
        num_hidden_layers=10,
        num_attention_heads=8,
        vocab_size=8192,
        max_position_embeddings=64,
        eos_token_id=0,
        pad_token_id=1,
    )
    source = tmp_path / "original"
    source.mkdir()
    generator = torch.Generator().manual_seed(0)
    entries = tensor_table(config)
    weights = {}
    for entry in entries:
        inputs = 6144 if "blocks" in entry.original and ".ff_out." in entry.original else 1024
        is_norm = "norm" in entry.original or "ln_f" in entry.original
        shape = (sum(entry.rows),) if is_norm else (sum(entry.rows), inputs)
        weights[entry.original] = 0.02 * torch.randn(shape, generator=generator)
    content = OriginalContent(model_config=config_to_original(config), weights=from_memory(weights))
    write_original(source, content, "pt")
    largest = max(tensor.numel() * 4 for tensor in weights.values())
    total = sum(tensor.numel() * 4 for tensor in weights.values())
    del weights
    assert total > 15 * largest
    steps = [[source, tmp_path / "hf"]]
    if direction != "to huggingface":
        steps.append([tmp_path / "hf", tmp_path / "back", "--original-format", direction.split()[-1]])
    for words in steps:
        command = [sys.executable, "-c", MEASURE, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split("peak ")[1])
    assert peak < 3 * largest, f"peak {peak / 2**20:.0f} MiB, largest tensor {largest / 2**20:.0f} MiB"
