"""`benchmarks/gpu_check.sh` on a CPU: every choice is timed or left out with its reason; both loops do equal work."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.measuring import gpu_step
from benchmarks.measuring.gpu_step import SIZES, Choice, build, loss_of, run_choice

ROOT = Path(__file__).resolve().parents[2]
QUICK = {"size": "tiny", "device": "cpu", "backend": "eager", "warm_steps": 1, "steps": 2}


@pytest.mark.parametrize(
    ("model", "loss", "compile"),
    [("transformers", "plain", "no"), ("ours", "plain", "model"), ("ours", "chunked", "layers")],
)
def test_a_choice_that_can_be_had_is_timed(model, loss, compile):
    found = run_choice(Choice(model=model, attention="sdpa", loss=loss, compile=compile, **QUICK))["found"]
    assert len(found) == 1
    assert found[0]["seconds"] > 0
    assert found[0]["peak_bytes"] > 0
    assert found[0]["tokens"] == 2 * 64


@pytest.mark.parametrize(
    ("attention", "loss", "reason"),
    [
        ("sdpa", "flash", "needs a CUDA device"),
        ("sdpa", "liger", "needs a CUDA device"),
        ("flex_attention", "plain", "no backward pass on CPUs"),
        ("flash_attention_2", "plain", "FlashAttention2"),
    ],
)
def test_a_choice_that_cannot_be_had_says_why(attention, loss, reason):
    assert reason in run_choice(Choice(model="ours", attention=attention, loss=loss, **QUICK))["skipped"]


@pytest.mark.parametrize("loss", ["plain", "chunked"])
def test_both_models_are_given_the_same_work(loss):
    """Equal losses and gradients from equal weights, to float32's last bits."""
    fields = SIZES["tiny"].fields
    choices = [Choice(model=model, attention="sdpa", loss=loss, **QUICK) for model in ("ours", "transformers")]
    models = [build(choice, fields) for choice in choices]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(2, fields["vocab_size"], (2, 64), generator=torch.Generator().manual_seed(0))
    losses = [loss_of(choice, model)(ids) for choice, model in zip(choices, models, strict=True)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    for one in losses:
        one.backward()
    first, second = (model.model.layers[0].mlp.up_proj.weight.grad for model in models)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4 * float(second.abs().max()))


def test_a_whole_model_is_scaled_up_from_one_layer_and_two():
    choice = Choice(model="ours", attention="sdpa", loss="plain", layers=[1, 2], **QUICK)
    one, two = run_choice(choice)["found"]
    assert two["flops_per_token"] > one["flops_per_token"]
    one, two = one | {"seconds": 1.0, "peak_bytes": 10}, two | {"seconds": 1.5, "peak_bytes": 13}
    whole = gpu_check.scaled_up([one, two], 32)
    assert (whole["seconds"], whole["peak_bytes"]) == (1.0 + 31 * 0.5, 10 + 31 * 3)
    expected = gpu_step.flops_per_token(gpu_step.OlmoHfConfig(**SIZES["tiny"].fields | {"num_hidden_layers": 32}), 64)
    assert whole["flops_per_token"] == expected.total


def test_the_verdicts_compare_like_with_like():
    def found(seconds: float) -> dict[str, float]:
        return {"seconds": seconds, "tokens": 100, "flops_per_token": 1e10, "peak_flops": 2e12, "peak_bytes": 3e9}

    row = gpu_check.Row
    timed = {
        row("transformers", "sdpa", "plain", "no"): found(2.0),
        row("transformers", "sdpa", "plain", "model"): found(1.6),
        row("ours", "sdpa", "chunked", "no"): found(1.9),
        row("ours", "sdpa", "chunked", "layers"): found(0.8),
        row("ours", "flash_attention_2", "chunked", "no"): found(0.1),
        row("ours", "sdpa", "auto", "no", layers=(1, 2)): found(0.1),
    }
    said = "\n".join(gpu_check.verdicts(timed))
    assert "best MFU, compiled: 62.5% (ours sdpa chunked layers); target 50%" in said
    assert "not compiled: 0.950" in said
    assert " compiled: 0.500" in said
    line = gpu_check.line_of(row("ours", "sdpa", "chunked", "no"), found(1.0))
    assert line == "| ours | sdpa | chunked | no | 1.000 | 100 | 50.0% | 3.0 |"


def test_every_choice_of_the_package_is_in_the_table():
    assert {row.attention for row in gpu_check.ROWS} == {"auto", "sdpa", "flash_attention_2", "flex_attention"}
    assert {row.loss for row in gpu_check.ROWS} == {"auto", "plain", "chunked", "flash", "liger"}
    assert {row.compile for row in gpu_check.ROWS} == {"no", "model", "layers"}
    assert {row.model for row in gpu_check.ROWS} == {"ours", "transformers", "train_hf.py"}
    assert gpu_check.NUMERICS_SECONDS + gpu_check.CHOICE_SECONDS < 8 * 60


@pytest.mark.slow
def test_the_whole_script_on_a_cpu():
    words = [str(ROOT / "benchmarks" / "gpu_check.sh"), "--device", "cpu", "--size", "tiny", "--backend", "eager"]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    said = done.stdout.partition("Left out:")
    for row in gpu_check.ROWS:
        cells = f"| {row.label} | {row.attention} | {row.loss} | {row.compile} |"
        needs_a_gpu = row.attention in ("flash_attention_2", "flex_attention") or row.loss in ("flash", "liger")
        assert (cells in said[0]) != needs_a_gpu, done.stdout
        assert (f"- {row.words}: " in said[2]) == needs_a_gpu, done.stdout
    assert "hold," in said[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_card_nothing_is_tried(monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    with pytest.raises(SystemExit, match=r"no CUDA device can be used here .*; --device cpu --size tiny tries"):
        gpu_check.main()


def test_no_time_is_no_failure_of_the_others(capsys, monkeypatch):
    monkeypatch.setattr(
        "sys.argv", ["gpu_check", "--device", "cpu", "--size", "tiny", "--skip-numerics", "--seconds", "1"]
    )
    assert gpu_check.main() == 1
    said = capsys.readouterr().out
    assert said.count(": no time") == len(gpu_check.ROWS)
