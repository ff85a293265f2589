"""A checkpoint is a model: stock tools that know nothing of this package work on it, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import runs

STOCK = """
import sys
sys.modules["olmo_hf"] = None  # importing it would fail
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
directory = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(directory)
tokenizer = AutoTokenizer.from_pretrained(directory)
inputs = tokenizer("def parse(", return_tensors="pt")
written = model.generate(**inputs, max_new_tokens=8, do_sample=False)
print(type(model).__module__, type(model).__name__, model.dtype, written.shape[1] - inputs["input_ids"].shape[1])
print(repr(tokenizer.decode(written[0])))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on this package's own source files, prepared as a user would."""
    directory = tmp_path_factory.mktemp("trained")
    prepare = [
        sys.executable,
        "-m",
        "olmo_hf.cli.main",
        "prepare-data",
        str(runs.ROOT / "olmo_hf"),
        "--pattern",
        "*.py",
    ]
    prepare += ["--train-tokenizer", "600", "--output", str(directory / "data")]
    subprocess.run(prepare, check=True, env=runs.environment(), capture_output=True)
    config = runs.write_run(directory, max_duration=4, save_interval_ephemeral=None)
    text = config.read_text()
    assert str(directory / "tokens.npy") in text
    text = text.replace(str(directory / "tokens.npy"), str(directory / "data" / "train" / "*.npy"))
    text = text.replace("    vocab_size: 128\n", "    vocab_size: 640\n")
    text = text.replace("    eos_token_id: 0\n", "").replace("    pad_token_id: 1\n", "")
    config.write_text(text)
    runs.run(config, f"--model.tokenizer={directory / 'data' / 'tokenizer'}", "--data.sequence_length=64")
    return directory / "run" / "latest"


def offline(**extra: str) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return {**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **extra}


def test_stock_transformers_loads_it_and_writes(trained: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOCK, str(trained)], cwd=tmp_path, env=offline(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith(
        "transformers.models.olmo2.modeling_olmo2 Olmo2ForCausalLM torch.float32 8\n'def parse("
    )


def test_the_checkpoint_says_what_generation_needs(trained: Path) -> None:
    config = json.loads((trained / "config.json").read_text())
    generation = json.loads((trained / "generation_config.json").read_text())
    assert config["model_type"] == "olmo2"
    assert config["architectures"] == ["Olmo2ForCausalLM"]
    assert config["use_cache"] is True
    assert config["max_position_embeddings"] == 64
    assert isinstance(config["rope_theta"], float)
    assert generation["eos_token_id"] == config["eos_token_id"] == 0
    assert generation["pad_token_id"] == config["pad_token_id"] == 1


def test_sample_script(trained: Path) -> None:
    command = [sys.executable, str(runs.ROOT / "examples" / "sample.py"), str(trained), "--tokens", "5"]
    done = subprocess.run(command, env=offline(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Olmo2ForCausalLM with" in done.stdout
    assert "import os" in done.stdout


def test_lm_eval_prints_a_number(trained: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={trained},dtype=float32"]
    command += ["--tasks", "python_completion", "--include_path", "examples/lm_eval", "--device", "cpu"]
    command += ["--batch_size", "4", "--output_path", str(tmp_path)]
    done = subprocess.run(
        command, cwd=runs.ROOT, env=offline(HF_HOME=str(tmp_path / "hf")), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(next(tmp_path.rglob("results_*.json")).read_text())
    assert 0.0 <= results["results"]["python_completion"]["acc,none"] <= 1.0
    assert results["n-samples"]["python_completion"]["effective"] == 20
    assert results["max_length"] == 64, "the harness cuts prompts at the length the model was trained with"
