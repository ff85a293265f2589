"""Inputs and outputs of modules: saved as they were, compared between runs, and without a trace on training."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from olmo_hf.callbacks.args import CallbacksArgs, ModelOutputsArgs, callbacks_problems
from olmo_hf.callbacks.data_indices import data_indices_path, read_data_indices
from olmo_hf.callbacks.model_outputs import model_outputs_path
from olmo_hf.cli.main import main
from olmo_hf.config_file import load_run
from olmo_hf.errors import ConfigError
from tests import runs
from tests.forks import Forks


@pytest.fixture(scope="module")
def saved(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run without dropout that saved step 5 and 9."""
    directory = tmp_path_factory.mktemp("outputs")
    config = runs.write_run(directory, dropout=0.0, save_interval=4, save_interval_ephemeral=None)
    forks.run(config, "--callbacks.model_outputs.steps=[5,9]")
    return directory / "run"


def test_they_are_what_stock_transformers_computes(saved: Path) -> None:
    tensors = load_file(model_outputs_path(saved, 5))
    ids = read_data_indices(data_indices_path(saved, 0))[5][:2]  # the first micro-batch
    rows = torch.from_file(str(saved.parent / "tokens.npy"), size=16 * 42, dtype=torch.uint16).long().view(42, 16)
    tokens = rows[ids]  # (2, 16)
    assert tensors["model.input"].tolist() == tokens.tolist()
    model = AutoModelForCausalLM.from_pretrained(saved / "checkpoint-4").eval()
    with torch.no_grad():
        output = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    # Two implementations of the same float32 arithmetic.
    torch.testing.assert_close(tensors["model.norm.output"], output.hidden_states[-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tensors["model.layers.1.input"], output.hidden_states[1], rtol=1e-5, atol=1e-5)
    layer = tensors["model.layers.0.mlp.down_proj.input"]
    assert layer.shape == (2, 16, 64)
    assert set(model_outputs_path(saved, 5).parent.iterdir()) == {model_outputs_path(saved, step) for step in (5, 9)}


def test_saving_changes_no_bit(forks: Forks, saved: Path, tmp_path: Path) -> None:
    plain = runs.write_run(tmp_path, dropout=0.0, save_interval=4, save_interval_ephemeral=None)
    forks.run(plain)
    runs.same_run(saved, tmp_path / "run")


def test_comparing_names_the_first_difference(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    five, nine = (str(model_outputs_path(saved, step)) for step in (5, 9))
    assert main(["compare-outputs", five, five]) == 0
    assert "tensors agree" in capsys.readouterr().out
    assert main(["compare-outputs", five, nine]) == 1
    assert "the first is model.embed_tokens.input" in capsys.readouterr().out, "they read other tokens"
    changed = load_file(five)
    changed["model.layers.1.mlp.output"][0, 3, 2] += 1e-3
    del changed["model.norm.output"]
    with safe_open(five, framework="pt") as file:
        metadata = file.metadata()
    metadata["order"] = metadata["order"].replace('"model.norm.output", ', "").replace(', "model.norm.output"', "")
    save_file(changed, tmp_path / "changed.safetensors", metadata=metadata)
    assert main(["compare-outputs", five, str(tmp_path / "changed.safetensors")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["model.layers.1.mlp.output", "0.001"]
    assert "only in the first" in lines[1]
    assert main(["compare-outputs", five, str(saved / "metrics.jsonl")]) == 2
    assert "is no file of module outputs" in capsys.readouterr().err


def test_steps_must_be_named() -> None:
    for steps in ((), (0, 3)):
        problems = callbacks_problems(CallbacksArgs(model_outputs=ModelOutputsArgs(steps=steps)))
        assert problems[0].startswith(f"callbacks.model_outputs.steps is {list(steps)}, but must name steps")


def test_a_compiled_model_has_no_modules_to_look_at(tmp_path: Path) -> None:
    config = runs.write_run(tmp_path)
    with pytest.raises(ConfigError, match=r"model_outputs: given together with `training.torch_compile`"):
        load_run(config, ["--callbacks.model_outputs.steps=[5]", "--training.torch_compile=true"])
