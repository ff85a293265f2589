"""Every attention path of a GPU against float32: the comparison of `benchmarks/gpu_numerics.py`, path by path.

On a machine without a GPU the comparison itself is tried with sdpa, and everything else is skipped with its reason.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_numerics.py"
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def script(monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_numerics", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_numerics", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16 autocast"])
@pytest.mark.parametrize("path", ["sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"])
def test_path_on_a_gpu(script, path, precision):
    unusable = {}
    inputs = script.Inputs.make("cuda")
    shapes = list(script.SHAPES) if precision == "bf16" else ["heads of 64, grouped"]
    rows = [row for s in shapes for row in script.compare(s, precision, inputs, unusable, ("eager", path))]
    if path in unusable:
        pytest.skip(f"{path} cannot be used here: {unusable[path]}")
    if not any(row.path == path for row in rows):
        pytest.skip(f"{path} does not work in {precision}")
    assert [row for row in rows if not row.passed] == []


@pytest.fixture
def small(script, monkeypatch):
    """The same comparison, small enough for a CPU."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    monkeypatch.setattr(script, "SIZE", script.SIZE | size | {"vocab_size": 128, "initializer_range": 0.2})
    monkeypatch.setattr(script, "LENGTH", 48)
    monkeypatch.setattr(script, "CACHED", 40)
    monkeypatch.setattr(script, "DOCUMENTS", ((20, 1, 27, 0), (48, 0, 0, 0), (10, 11, 12, 15)))
    monkeypatch.setattr(script, "PADDING", (0, 7, 30))
    monkeypatch.setattr(script, "SHAPES", {"grouped": {"num_key_value_heads": 2}, "alibi": script.SHAPES["alibi"]})
    return script


@pytest.mark.parametrize("precision", ["fp32", "bf16 autocast"])
@pytest.mark.parametrize("shape", ["grouped", "alibi"])
def test_the_comparison_holds_for_sdpa(small, shape, precision):
    unusable = {}
    rows = small.compare(shape, precision, small.Inputs.make("cpu"), unusable, ("eager", "sdpa", "flash_attention_2"))
    assert {row.case for row in rows} == set(small.CASES)
    assert [row for row in rows if not row.passed] == []
    assert {row.path for row in rows} == {"eager", "sdpa"}
    assert not unusable.keys() - {"flash_attention_2"}


@pytest.mark.parametrize("fault", ["documents", "precision", "nan"])
def test_the_comparison_notices_faults(small, monkeypatch, fault):
    wrong = {
        "documents": lambda model, x: small.with_gradient(model, model(x.ids, use_cache=False).logits, x.ids),
        "precision": lambda model, x: {k: v * (1 + 1e-4) for k, v in small.packed(model, x).items()},
        "nan": lambda model, x: {k: v * float("nan") for k, v in small.packed(model, x).items()},
    }
    monkeypatch.setattr(small, "CASES", {"packed": (wrong[fault], small.alone)})
    rows = small.compare("grouped", "fp32", small.Inputs.make("cpu"), {}, ("eager", "sdpa"))
    assert [row.passed for row in rows] == [False, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here the script has a GPU to measure")
def test_without_a_gpu_the_script_says_so():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no CUDA device here" in done.stderr
