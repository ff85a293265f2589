"""The example of two stages: its files fit together, its recipe names what is there, and its comparison is right."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from olmo_hf.config_file import load_run
from olmo_hf.recipes.average import average, open_ingredients
from olmo_hf.training.schedulers import learning_rate_curve
from tests.model.tiny import tiny_model

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "two_stage"


def test_the_second_stage_begins_where_the_first_one_ends():
    first, second = (load_run(EXAMPLE / f"stage{number}.yaml") for number in (1, 2))
    curve = learning_rate_curve(
        first.training.scheduler, peak_lr=first.training.learning_rate, max_steps=240, max_tokens=240 * 4096
    )
    assert second.training.learning_rate == pytest.approx(curve(240, 240 * 4096), rel=1e-3)
    assert second.training.resume == first.training.output_dir == "runs/two-stage/stage1"
    assert second.training.reset_trainer_state
    assert (second.training.scheduler.name, second.training.scheduler.alpha_f) == ("linear_with_warmup", 0.0)
    assert second.evaluation.evaluators == first.evaluation.evaluators
    assert second.data.sources.keys() == {"code", "prose"}


def test_the_recipe_names_what_is_there():
    words = ["make", "--dry-run", "--always-make", "example-two-stage", "PYTHON=python3"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    for name in re.findall(r"(?:examples|accelerate_configs)/[\w./]+", found.stdout):
        assert (ROOT / name).exists(), name
    assert found.stdout.count("stage2.yaml --name=seed$seed --training.seed=$seed") == 1
    assert "for seed in 42 666 42069" in found.stdout


@pytest.fixture
def models(tmp_path):
    """Two models, their average, and tokens to measure them on."""
    for number in (0, 1):
        model = tiny_model()
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / f"model{number}")
    average(open_ingredients([tmp_path / "model0", tmp_path / "model1"]), tmp_path / "soup")
    np.random.default_rng(0).integers(2, 100, 16 * 20, dtype=np.uint16).tofile(tmp_path / "held-out.npy")
    (tmp_path / "run.yaml").write_text(
        "name: x\nmodel: {preset: olmo2_tiny}\ndata: {paths: [held-out.npy], sequence_length: 16}\n"
        "training: {max_duration: 1, global_train_batch_size: 8, per_device_train_batch_size: 8, "
        "per_device_eval_batch_size: 8}\n"
        "evaluation: {evaluators: [{label: text, data: {paths: [held-out.npy], token_dtype: uint16, "
        "sequence_length: 16, shuffle: false}}]}\n"
    )
    return tmp_path


def test_the_comparison_measures_what_it_says(models):
    names = [f"{name}={models / name}" for name in ("model0", "model1", "soup")]
    command = [sys.executable, str(EXAMPLE / "compare.py"), "run.yaml", *names, "--output", "table"]
    found = subprocess.run(command, cwd=models, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    measured = json.loads((models / "table.json").read_text())
    tokens = torch.tensor(np.fromfile(models / "held-out.npy", dtype=np.uint16).reshape(20, 16).astype(np.int64))
    for name, metrics in measured.items():
        model = AutoModelForCausalLM.from_pretrained(models / name)
        with torch.no_grad():  # 20 rows of 15 targets each, so that the mean of rows is that of tokens
            loss = model(tokens, labels=tokens).loss.item()
        assert metrics["eval/text/CrossEntropyLoss"] == pytest.approx(loss, abs=1e-5)  # sums in another order, fp32
    losses = {name: metrics["eval/text/CrossEntropyLoss"] for name, metrics in measured.items()}
    best = min(losses, key=lambda name: losses[name])
    table = (models / "table.md").read_text()
    assert f"| {best} | **{losses[best]:.4f}** |" in table
    assert table.count("**") == 2
    mean = (losses["model0"] + losses["model1"]) / 2
    assert f"soup less the mean of model0, model1: text {losses['soup'] - mean:+.4f}" in table
    assert (models / "soup" / "metrics.jsonl").is_file()
    assert not (models / "model0" / "metrics.jsonl").exists()


def test_a_model_that_is_not_there_is_named(tmp_path):
    command = [sys.executable, str(EXAMPLE / "compare.py"), "run.yaml", "a=nowhere", "--output", "table"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert found.returncode == 2
    assert "a=nowhere: expected NAME=CHECKPOINT" in found.stderr
