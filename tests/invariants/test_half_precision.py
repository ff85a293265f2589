"""bfloat16 follows float32, alone and on shards; the band is what rounding to 8 bits makes of a loss near 4.85."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from tests import runs
from tests.invariants.test_restart_on_ranks import shards
from tests.invariants.test_split import FSDP
from tests.served import Ranks

STEPS = 6


def trained(directory: Path, *, processes: int = 1, env: dict[str, str] | None = None, **training: object) -> dict:
    config = runs.write_run(
        directory, dropout=0.0, max_duration=STEPS, save_interval=None, learning_rate=1e-3, **training
    )
    runs.run(config, processes=processes, **(env or {}))
    return runs.losses(directory / "run")


def test_masters_and_moments_are_float32_from_a_bfloat16_start_and_after_a_restart(one: Ranks, tmp_path: Path) -> None:
    settings = {"bf16": True, "use_cpu": True, "max_duration": 4, "save_interval": None}
    source = runs.write_run(tmp_path / "source", **settings)
    one.run(source, "--training.stop_at=1")
    start = OlmoHfForCausalLM.from_pretrained(tmp_path / "source" / "run" / "latest", dtype=torch.bfloat16)
    start.save_pretrained(tmp_path / "start")
    assert set(dtypes(tmp_path / "start")) == {torch.bfloat16}
    config = runs.write_run(tmp_path / "on", **settings)
    fields = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**fields, "model": {"init_from": str(tmp_path / "start")}}))
    for stop in ("--training.stop_at=2", "--training.stop_at=3"):
        one.run(config, stop)
        assert set(dtypes(tmp_path / "on" / "run" / "latest")) == {torch.float32}
    moments = load_file(tmp_path / "on" / "run" / "latest" / "optimizer.safetensors")
    assert any(not torch.equal(t, t.bfloat16().float()) for name, t in moments.items() if "exp_avg" in name)


def dtypes(directory: Path) -> list[torch.dtype]:
    """Of all floating-point tensors of a checkpoint, moments included."""
    tensors = [t for file in directory.glob("*.safetensors") for t in load_file(file).values()]
    return [t.dtype for t in tensors if t.is_floating_point() and t.ndim > 0]


def test_bfloat16_follows_float32(one: Ranks, tmp_path: Path) -> None:
    found = []
    for name, settings in (("fp32", {}), ("bf16", {"bf16": True, "use_cpu": True})):
        changes = {"dropout": 0.0, "max_duration": STEPS, "save_interval": None, "learning_rate": 1e-3}
        one.run(runs.write_run(tmp_path / name, **changes, **settings))
        found.append(runs.losses(tmp_path / name / "run"))
    exact, half = found
    assert [loss for loss, _, _ in half.values()] == pytest.approx([loss for loss, _, _ in exact.values()], rel=2**-11)
    assert exact != half


def test_gradients_are_summed_in_float32_or_when_asked_in_bfloat16(fsdp: Ranks, tmp_path: Path) -> None:
    """`mixed` and `pure` of the original. Without a memory (beta1 0) Adam's first moment is the gradient itself."""
    settings = {"bf16": True, "use_cpu": True, "max_duration": 1, "adam_beta1": 0.0, "max_grad_norm": 0.0}
    whole_batch = {"per_device_train_batch_size": 4, "save_interval": None, "save_interval_ephemeral": None}
    in_bfloat16 = {}
    for name, reduces in (("mixed", False), ("pure", True)):
        config = runs.write_run(tmp_path / name, dropout=0.0, **settings, **whole_batch, fsdp_reduce_in_half=reduces)
        fsdp.run(config)
        moments = shards(tmp_path / name / "run")
        gradients = [tensor for key, tensor in moments.items() if key.endswith(".exp_avg")]
        assert gradients
        in_bfloat16[name] = [torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients]
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert all(in_bfloat16["pure"])
    assert not any(in_bfloat16["mixed"])


@pytest.mark.slow
def test_bfloat16_follows_float32_on_one_process_and_on_shards(tmp_path):
    exact = trained(tmp_path / "fp32")
    found = {
        "alone": trained(tmp_path / "alone", bf16=True, use_cpu=True),
        "shards": trained(tmp_path / "shards", bf16=True, use_cpu=True, processes=2, env=FSDP),
        "plain": trained(
            tmp_path / "plain", bf16=True, use_cpu=True, processes=2, env=FSDP, loss_implementation="plain"
        ),
    }
    for kind, losses in found.items():
        assert set(losses) == set(exact), kind
        for step, (cross_entropy, grad_norm, rate) in losses.items():
            # Rounding to bfloat16 is 2**-9 of a value; a loss averages it over 128 tokens (measured: 1e-4, 2e-3).
            assert cross_entropy == pytest.approx(exact[step][0], rel=2**-11), (kind, step)
            assert grad_norm == pytest.approx(exact[step][1], rel=2**-6), (kind, step)
            assert rate == exact[step][2], (kind, step)
        assert any(losses[step] != exact[step] for step in losses), "half precision was not used"
        # The logged loss itself is not rounded to bfloat16: six values of 8 bits by chance is one in 10**14.
        assert any(float(value) != rounded(value) for value, _, _ in losses.values()), kind


def rounded(value: float) -> float:
    return torch.tensor(value).bfloat16().item()
