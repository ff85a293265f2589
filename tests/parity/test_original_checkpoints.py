"""Checkpoints that the original trainer wrote: read, run, and continued."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import Olmo2ForCausalLM

from olmo_hf.cli.main import main
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.conversion.convert import OPTIMIZER_FILE, OPTIMIZER_PREFIX, RUN_STATE, SHARDED_DIR
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training import checkpoints, commit, state, tensors

GOLDEN = Path(__file__).parents[1] / "golden"
CHECKPOINTS = GOLDEN / "11_checkpoints"
TRAJECTORIES = GOLDEN / "10_trajectories"
KINDS = sorted(path.name for path in CHECKPOINTS.glob("*/config.yaml") for path in [path.parent])


def converted(name: str, target: Path, *options: str) -> Path:
    assert main(["convert", str(CHECKPOINTS / name), str(target), *options]) == 0
    return target


def test_constants_are_those_of_the_training_room():
    assert (OPTIMIZER_FILE, SHARDED_DIR, RUN_STATE) == (tensors.OPTIMIZER_FILE, tensors.SHARDED_DIR, state.RUN_STATE)


@pytest.mark.parametrize("name", KINDS)
def test_logits_of_every_kind(tmp_path, capsys, name):
    target = converted(name, tmp_path / "out")
    assert "largest |logit difference| on random ids: 0\n" in capsys.readouterr().out
    expected = "expected_logits" if name == "step30-unsharded" else "expected_logits_sharded"
    stored = load_file(CHECKPOINTS / f"{expected}.safetensors")
    for model_class in (OlmoHfForCausalLM, Olmo2ForCausalLM):
        model, info = model_class.from_pretrained(target, output_loading_info=True)
        assert not any(info.values())
        with torch.no_grad():
            logits = model.eval()(stored["input_ids"].long()).logits
        torch.testing.assert_close(logits, stored["logits"], atol=1e-5, rtol=0)


def test_sharded_kinds_hold_the_same_as_the_unsharded_one(tmp_path):
    reference = converted("unsharded_from_fsdp", tmp_path / "reference")
    for name in KINDS:
        if name.startswith("sharded_"):
            target = converted(name, tmp_path / name)
            for file in ("model.safetensors", OPTIMIZER_FILE):
                found, expected = load_file(target / file), load_file(reference / file)
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[key], expected[key]) for key in expected), (name, file)


def test_encoded_safetensors_hold_the_plain_ones(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.yaml").write_text((CHECKPOINTS / "unsharded_from_fsdp" / "config.yaml").read_text())
    encoded = (CHECKPOINTS / "safetensors_variant" / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(encoded)
    assert main(["convert", str(source), str(tmp_path / "hf")]) == 0
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "back"), "--original-format", "safetensors"]) == 0
    plain = load_file(CHECKPOINTS / "safetensors_variant" / "same_weights_plain_names.safetensors")
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "pt")]) == 0
    written = torch.load(tmp_path / "pt" / "model.pt", weights_only=True)
    assert written.keys() == plain.keys()
    assert all(torch.equal(written[name], plain[name]) for name in plain)
    # Same names, encoded; the order of tensors is ours.
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()


def test_converted_checkpoint_is_one_of_a_run(tmp_path):
    target = converted("step30-unsharded", tmp_path / "out")
    manifest = commit.verify(target)
    assert (manifest.step, manifest.tokens, manifest.kind) == (30, 7680, "unsharded")
    run_state = state.load_run_state(target)
    assert (run_state.position.epoch, run_state.position.instances) == (0, 240)


def test_next_steps_of_the_original(tmp_path):
    """Thirty more steps from weights and optimizer state of step 30 are the steps that the original took."""
    target = converted("step30-unsharded", tmp_path / "out")
    model = OlmoHfForCausalLM.from_pretrained(target)
    embedding = model.model.embed_tokens.weight
    others = [p for p in model.parameters() if p is not embedding]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": [embedding], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    checkpoints.restore_tensors(target, model, optimizer)
    assert {int(values["step"]) for values in optimizer.state.values()} == {30}

    config = json.loads((TRAJECTORIES / "index.json").read_text())["t04b_exact_resume"]["config"]
    length, rows = 32, []
    for path in config["data"]["paths"]:
        tokens = np.fromfile(TRAJECTORIES / path, dtype=np.uint16)
        rows.append(tokens[: len(tokens) // length * length].reshape(-1, length))
    instances = torch.from_numpy(np.concatenate(rows).astype(np.int64))
    recorded = np.load(TRAJECTORIES / "t04b_exact_resume.npz")
    losses, norms = [], []
    for batch, lr in zip(recorded["instance_indices"], recorded["lr"], strict=True):
        ids = instances[torch.from_numpy(batch)]
        logits = model(ids).logits[:, :-1]
        optimizer.zero_grad()
        # Denominator of the original: all positions of the batch, the last of each row included.
        ce = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / ids.numel()
        z = 1e-4 * logits.logsumexp(-1).pow(2).sum() / ids.numel()
        (ce + z).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), config["max_grad_norm"]).item())
        for group in optimizer.param_groups:
            group["lr"] = float(lr)
        optimizer.step()
        losses.append(ce.item())
    # Measured spread of the original between kernels and batch splits: CE 1e-6, norms 4e-6 relative.
    np.testing.assert_allclose(losses, recorded["loss_ce"], atol=5e-6, rtol=0)
    np.testing.assert_allclose(norms, recorded["grad_norm"], rtol=1e-4)


def test_optimizer_state_there_and_back(tmp_path):
    there = converted("unsharded_from_fsdp", tmp_path / "there")
    assert main(["convert", str(there), str(tmp_path / "back")]) == 0
    before = torch.load(CHECKPOINTS / "unsharded_from_fsdp" / "optim.pt", weights_only=True)["state"]
    after = torch.load(tmp_path / "back" / "optim.pt", weights_only=True)["state"]
    assert after.keys() == before.keys()
    for name, values in before.items():
        assert after[name].keys() == values.keys()
        assert all(torch.equal(after[name][key], values[key]) for key in values)
    stored = load_file(there / OPTIMIZER_FILE)
    assert all(name.startswith(OPTIMIZER_PREFIX) for name in stored)


@pytest.mark.slow
def test_train_hf_goes_on_where_the_original_stopped(tmp_path):
    """The whole way: `olmo-hf convert`, then `train_hf.py` with `training.resume`, in the original's data order."""
    target = converted("step30-unsharded", tmp_path / "converted")
    golden = json.loads((TRAJECTORIES / "index.json").read_text())["t04b_exact_resume"]["config"]
    model = OlmoHfConfig.from_pretrained(target).to_init_dict()
    run = {
        "name": "continued",
        "model": {"config": {name: value for name, value in model.items() if value is not None}},
        "data": {
            "paths": [str(TRAJECTORIES / path) for path in golden["data"]["paths"]],
            "token_dtype": "uint16",
            "sequence_length": golden["model"]["max_sequence_length"],
        },
        "training": {
            "output_dir": str(tmp_path / "run"),
            "resume": str(target),
            "max_duration": golden["max_duration"],
            "global_train_batch_size": golden["global_train_batch_size"],
            "per_device_train_batch_size": golden["device_train_microbatch_size"],
            "learning_rate": golden["optimizer"]["learning_rate"],
            "weight_decay": golden["optimizer"]["weight_decay"],
            "adam_epsilon": golden["optimizer"]["eps"],
            "adam_beta1": golden["optimizer"]["betas"][0],
            "adam_beta2": golden["optimizer"]["betas"][1],
            "decay_norm_and_bias": golden["optimizer"]["decay_norm_and_bias"],
            "decay_embeddings": golden["optimizer"]["decay_embeddings"],
            "max_grad_norm": golden["max_grad_norm"],
            "z_loss_weight": 1e-4,  # what the original really uses
            "loss_denominator": "batch_tokens",
            "seed": golden["seed"],
            "logging_steps": 1,
            "scheduler": {
                "name": golden["scheduler"]["name"],
                "units": golden["scheduler"]["units"],
                "warmup": golden["scheduler"]["t_warmup"],
                "t_max": golden["scheduler"]["t_max"],
                "alpha_f": golden["scheduler"]["alpha_f"],
                "warmup_min_lr": golden["scheduler"]["warmup_min_lr"],
            },
        },
    }
    OmegaConf.save(OmegaConf.create(run), tmp_path / "run.yaml")
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "train_hf.py"), str(tmp_path / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr

    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    logged = {row["step"]: row for row in rows if "train/CrossEntropyLoss" in row}
    recorded = np.load(TRAJECTORIES / "t04b_exact_resume.npz")
    assert sorted(logged) == recorded["step"].tolist()
    for name, key, tolerance in (
        ("train/CrossEntropyLoss", "loss_ce", {"atol": 5e-6, "rtol": 0}),
        ("optim/learning_rate_group0", "lr", {"rtol": 1e-12}),
        ("optim/total_grad_norm", "grad_norm", {"rtol": 1e-4}),
    ):
        found = [logged[step][name] for step in recorded["step"].tolist()]
        np.testing.assert_allclose(found, recorded[key], err_msg=name, **tolerance)
