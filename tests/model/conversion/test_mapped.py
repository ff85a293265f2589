"""Tensors mapped one by one: the numbers that the libraries read, and files that are larger than the machine."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from olmo_hf.errors import ConversionError
from olmo_hf.model.conversion.mapped import load_torch_file_in_pieces, places_in_safetensors
from olmo_hf.model.conversion.safe_load import load_torch_file

GOLDEN = Path(__file__).parents[2] / "golden" / "11_checkpoints"


def write_raw(path, header, data):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


def entry(begin, end, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_the_numbers_of_the_library(tmp_path):
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(5).bfloat16(),
        "c": torch.tensor(7),
        "d": torch.empty(0, 5),
        "e": torch.tensor([True, False, True]),
        "f": torch.randn(2, 2).half(),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    places = places_in_safetensors(tmp_path / "x.safetensors")
    stored = load_file(tmp_path / "x.safetensors")
    assert places.keys() == stored.keys()
    for name, tensor in stored.items():
        mapped = places[name].map()
        assert (mapped.dtype, mapped.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(mapped, tensor)


@pytest.mark.parametrize("padding", range(4))
def test_any_alignment_in_the_file(tmp_path, padding):
    expected = torch.randn(6)
    header = json.dumps({"a": entry(0, 24, (6,))}).encode()
    header += b" " * (-len(header) % 4 + padding)
    path = write_raw(tmp_path / "x.safetensors", header, expected.numpy().tobytes())
    assert torch.equal(places_in_safetensors(path)["a"].map(), expected)


def test_writing_to_a_mapped_tensor_leaves_the_file_alone(tmp_path):
    save_file({"a": torch.ones(4)}, tmp_path / "x.safetensors")
    torch.save({"a": torch.ones(4)}, tmp_path / "x.pt")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    places_in_safetensors(tmp_path / "x.safetensors")["a"].map().zero_()
    load_torch_file_in_pieces(tmp_path / "x.pt")["a"].zero_()
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12),
        ({"a": entry(0, 8), "b": entry(0, 8)}, 8),
        ({"a": entry(0, 8), "b": entry(0, 12, (3,))}, 12),
        ({"a": entry(0, 8), "b": entry(16, 24)}, 24),
        ({"a": entry(0, 8)}, 12),
        ({"a": entry(0, 8)}, 4),
        ({"a": entry(0, 8, (-1, -2))}, 8),
        ({"a": entry(0, 12)}, 12),
        ({"a": entry(-8, 0)}, 8),
        ({"a": entry(0, 8, (2.0,))}, 8),
        ({"a": entry(0.0, 8.0)}, 8),
        ({"a": entry(0, 8, (True, 2))}, 8),
        ({"a": entry(0, 2**70, (2**68,))}, 8),
        ({"a": entry(0, 8, dtype="F7")}, 8),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8),
        ({"a": [1]}, 8),
        ([1], 8),
        (b"{", 8),
        (b"", 0),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_the_library_refuses_is_refused(tmp_path, header, size):
    path = write_raw(tmp_path / "x.safetensors", header, bytes(size))
    with pytest.raises((SafetensorError, OSError)):
        load_file(path)
    with pytest.raises(ConversionError, match=r"x\.safetensors: is no readable"):
        places_in_safetensors(path)


def test_files_too_short_or_with_an_endless_header(tmp_path):
    for content in (b"", b"1234567", (1 << 62).to_bytes(8, "little") + b"{}"):
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(ConversionError, match="is no readable"):
            places_in_safetensors(tmp_path / "x.safetensors")


def same(one, other):
    assert isinstance(other, type(one) if not isinstance(one, dict) else dict)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_a_torch_file_in_pieces_is_the_same(tmp_path):
    base = torch.randn(4, 6)
    content = {
        "whole": base,
        "view": base[1:3, ::2],
        "turned": torch.randn(3, 5).T,
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "half": torch.randn(7).bfloat16(),
        "state": {0: {"step": torch.tensor(3.0), "lr": 0.1}, "groups": [{"params": [0, 1], "betas": (0.9, 0.95)}]},
    }
    torch.save(content, tmp_path / "x.pt")
    pieces = load_torch_file_in_pieces(tmp_path / "x.pt")
    assert same(pieces, torch.load(tmp_path / "x.pt", weights_only=True))
    assert pieces["view"].untyped_storage().data_ptr() == pieces["whole"].untyped_storage().data_ptr()


@pytest.mark.parametrize("file", ["model.pt", "optim.pt"])
def test_files_of_the_original_in_pieces(file):
    path = GOLDEN / "step30-unsharded" / file
    assert same(load_torch_file_in_pieces(path), load_torch_file(path))


def memory_bytes():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_files_larger_than_the_memory_of_the_machine(tmp_path, tmp_path_factory):
    """They lie in holes of their files and take no room on the disk; no more than one page is read."""
    rows = math.ceil(1.5 * memory_bytes() / 8 / 4)
    # Mapped, not allocated: a process whose heap has once been larger than the memory can start no other by fork.
    hole = str(tmp_path_factory.mktemp("hole") / "hole")
    weights = {f"t{n}": torch.from_file(hole, shared=True, size=rows) for n in range(8)}
    with torch.serialization.skip_data():
        torch.save(weights, tmp_path / "model.pt")
    header = {name: entry(4 * rows * n, 4 * rows * (n + 1), (rows,)) for n, name in enumerate(weights)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # else the numbers lie askew and are copied
    write_raw(tmp_path / "model.safetensors", encoded, b"")
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) + 32 * rows)
    for path in tmp_path.iterdir():
        assert path.stat().st_size > memory_bytes()
        assert path.stat().st_blocks * 512 < 1e6
    from_torch = load_torch_file(tmp_path / "model.pt")
    from_safetensors = {name: p.map() for name, p in places_in_safetensors(tmp_path / "model.safetensors").items()}
    for tensors in (from_torch, from_safetensors):
        assert tensors.keys() == weights.keys()
        assert all(tensor.shape == (rows,) and tensor[-1] == 0 for tensor in tensors.values())
