"""Models that are sharded before they have memory: what they hold, what is put in, and how it is reduced."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from olmo_hf.errors import CheckpointError
from olmo_hf.model.args import ModelArgs
from olmo_hf.model.build import build_model
from olmo_hf.model.weights import check_weights, fill_weights, read_weights
from tests import runs
from tests.forks import Forks
from tests.invariants.test_split import FSDP

SHAPE = {
    "vocab_size": 301,
    "hidden_size": 32,
    "intermediate_size": 67,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "eos_token_id": 0,
    "pad_token_id": 1,
}


def sharded_weights(rank: int, source: str | None, tied: bool) -> dict[str, Any]:
    """The whole weights of a model that was built without memory, sharded, and filled."""
    args = ModelArgs(config=SHAPE | {"tie_word_embeddings": tied}) if source is None else ModelArgs(init_from=source)
    model = build_model(args, seed=3, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    fill_weights(model, args, seed=3)
    held = sum(parameter.to_local().numel() for parameter in set(model.parameters()))
    whole = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    return {"held": held, "whole": whole}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("source", ["drawn", "read"])
def test_every_rank_fills_its_own_part(two_ranks: Any, tmp_path: Path, source: str, tied: bool) -> None:
    whole = build_model(ModelArgs(config=SHAPE | {"tie_word_embeddings": tied}), seed=3)
    if source == "read":
        whole.save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    given = str(tmp_path) if source == "read" else None
    expected = dict(whole.named_parameters())
    total = sum(parameter.numel() for parameter in expected.values())
    for found in two_ranks(sharded_weights, given, tied):
        assert found["whole"].keys() == expected.keys()
        for name, parameter in expected.items():
            assert torch.equal(found["whole"][name], parameter), name
        assert found["held"] < 0.55 * total


def test_weights_in_half_precision_become_float32(tmp_path: Path) -> None:
    source = build_model(ModelArgs(config=SHAPE), seed=3).bfloat16()
    source.save_pretrained(tmp_path)
    model = build_model(ModelArgs(init_from=str(tmp_path)), seed=0, device="meta")
    model.to_empty(device="cpu")
    read_weights(model, str(tmp_path))
    for (name, ours), theirs in zip(model.named_parameters(), source.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs.float()), name


@pytest.mark.parametrize("fault", ["another shape", "another depth", "no files"])
def test_wrong_weights_are_refused_before_anything_is_sharded(tmp_path: Path, fault: str) -> None:
    build_model(ModelArgs(config=SHAPE), seed=3).save_pretrained(tmp_path)
    change = {"another shape": {"intermediate_size": 70}, "another depth": {"num_hidden_layers": 3}, "no files": {}}
    if fault == "no files":
        (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.init_from: the weights in"):
        build_model(ModelArgs(init_from=str(tmp_path), config=change[fault]), seed=0, device="meta")


def test_a_table_kept_by_older_files_is_no_weight(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = build_model(ModelArgs(config=SHAPE), seed=3)
    model.save_pretrained(tmp_path)
    table = load_file(tmp_path / "model.safetensors") | {"model.layers.0.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(table, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "lm_head.weight" in check_weights(model, str(tmp_path))


# ---- how often weights are gathered and gradients reduced ----

STEPS = 2


def counts(
    forks: Forks, directory: Path, variants: list[dict[str, Any]], ranks: int, **env: str
) -> list[dict[str, int]]:
    """Collectives of rank 0 in runs of two steps, which differ by the settings given."""
    config = runs.write_run(
        directory,
        dropout=0.0,
        max_duration=STEPS,
        save_interval_ephemeral=None,
        save_interval=None,
        save_at_start=False,
    )
    words = [
        [f"--training.{name}={value}" for name, value in variant.items()] + [f"--training.output_dir={directory}/{i}"]
        for i, variant in enumerate(variants)
    ]
    out = directory / "counts.json"
    counting = {"prepare": "tests.counted_collectives", "VARIANTS": json.dumps(words), "COUNTS": str(out)}
    forks.run(config, ranks=ranks, **counting, **env)
    return json.loads(out.read_text())


def test_fsdp_reduces_after_each_micro_batch_or_once(forks: Forks, tmp_path: Path) -> None:
    """A unit is the embedding, each of the two layers, or the last norm with the head: four of them."""
    each, once, grouped = counts(
        forks,
        tmp_path,
        [
            {"per_device_train_batch_size": 1},
            {"per_device_train_batch_size": 1, "defer_gradient_reduction": "true"},
            {"per_device_train_batch_size": 1, "defer_gradient_reduction": "true", "fsdp_layers_per_unit": 2},
        ],
        2,
        **FSDP,
    )
    assert each["FSDP::post_backward_reduce"] == 4 * STEPS * 4, "four micro-batches"
    assert once["FSDP::post_backward_reduce"] == 4 * STEPS
    assert grouped["FSDP::post_backward_reduce"] == 3 * STEPS, "both layers are one unit"
    losses = [runs.losses(tmp_path / str(i))[STEPS] for i in range(3)]
    for found in losses[1:]:
        assert found[:2] == pytest.approx(losses[0][:2], rel=1e-5)


def test_weights_are_gathered_as_often_as_they_are_needed(forks: Forks, tmp_path: Path) -> None:
    """Of four units two, the layers, are freed after the forward pass and needed again; an embedding is not."""
    variants = [{"per_device_train_batch_size": 1}, {"per_device_train_batch_size": 4}]
    four, one = counts(forks, tmp_path / "full", variants, 2, **FSDP)
    assert (four["FSDP::all_gather"], one["FSDP::all_gather"]) == (6 * 4 * STEPS, 6 * STEPS)
    four, one = counts(forks, tmp_path / "grad", variants, 2, **FSDP | {"FSDP_RESHARD_AFTER_FORWARD": "false"})
    assert (four["FSDP::all_gather"], one["FSDP::all_gather"]) == (4 * STEPS, 4 * STEPS), "once a step"
    full, grad = (runs.losses(tmp_path / name / "0")[STEPS] for name in ("full", "grad"))
    assert grad[:2] == full[:2], "the same numbers in the same order"


@pytest.mark.slow
def test_one_unit_for_all_layers(forks: Forks, tmp_path: Path) -> None:
    """`NO_WRAP`: embedding and head stay units of their own, and the numbers the same."""
    variants = [{"per_device_train_batch_size": 4}]
    policies = {"layers": FSDP, "none": FSDP | {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}}
    found = {
        name: counts(forks, tmp_path / name, variants, 2, **env)[0]["FSDP::all_gather"]
        for name, env in policies.items()
    }
    assert found["layers"] == 6 * STEPS
    assert found["none"] == 3 * STEPS, "the layers lie in the last unit, which stays gathered"
    layers, none = (runs.losses(tmp_path / name / "0")[STEPS] for name in policies)
    assert none[:2] == pytest.approx(layers[:2], rel=1e-5)


def test_ddp_reduces_once_whatever_the_micro_batch(forks: Forks, tmp_path: Path) -> None:
    four, one = counts(forks, tmp_path, [{"per_device_train_batch_size": 1}, {"per_device_train_batch_size": 4}], 2)
    assert four["c10d::allreduce_"] == one["c10d::allreduce_"] > 0


@pytest.mark.slow
def test_replicas_of_hsdp_meet_once(forks: Forks, tmp_path: Path) -> None:
    """Four processes in 2 x 2: two micro-batches or one, the same sums between replicas."""
    assert os.cpu_count()
    hybrid = {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
    }
    two, one = counts(
        forks, tmp_path, [{"per_device_train_batch_size": 1}, {"per_device_train_batch_size": 2}], 4, **FSDP, **hybrid
    )
    assert two["c10d::allreduce_"] == one["c10d::allreduce_"] > 0
    assert two["FSDP::post_backward_reduce"] == 2 * one["FSDP::post_backward_reduce"]
