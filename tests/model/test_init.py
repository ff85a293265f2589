"""Initial weights: the original's statistics, and bitwise the same numbers for every sharding."""

import json
import math
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from olmo_hf.model.args import ModelArgs
from olmo_hf.model.build import build_model
from olmo_hf.model.conversion.architecture import ORIGINAL_DEFAULTS, config_from_original
from olmo_hf.model.conversion.tensor_names import tensor_table
from olmo_hf.model.init import ROWS_PER_BLOCK, initialize_weights
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from tests.model.tiny import TINY, tiny_config

CASES = json.loads((Path(__file__).parents[1] / "golden" / "02_init" / "init.json").read_text())
MEASURED = [case for case in CASES if "params" in case]


def fresh_model(config, seed=0):
    model = OlmoHfForCausalLM(config)
    initialize_weights(model, seed)
    return model


def fused_parameters(model, layout):
    parameters = dict(model.named_parameters())
    for entry in tensor_table(model.config, layout):
        yield entry.original, entry.fuse([parameters[name].detach() for name in entry.ours])


@pytest.mark.parametrize("how", ["by name", "by transformers"])
@pytest.mark.parametrize("case", MEASURED, ids=lambda case: str(case["overrides"]))
def test_statistics_of_the_original(case, how):
    config, layout = config_from_original(case["model_config"])
    torch.manual_seed(0)
    model = fresh_model(config) if how == "by name" else OlmoHfForCausalLM(config)
    found = dict(fused_parameters(model, layout))
    assert found.keys() == case["params"].keys()
    for name, facts in case["params"].items():
        tensor = found[name]
        assert list(tensor.shape) == facts["shape"]
        if facts["constant"] is not None:
            assert bool((tensor == facts["constant"]).all()), name
            continue
        expected, count = facts["expected_std_after_truncation"], tensor.numel()
        assert tensor.std().item() == pytest.approx(expected, rel=6 / math.sqrt(2 * count)), name
        assert abs(tensor.mean().item()) < 6 * expected / math.sqrt(count), name
        if facts["cutoff"] is not None:
            assert tensor.abs().max().item() <= facts["cutoff"] * (1 + 1e-6), name


@pytest.mark.parametrize(("method", "gain"), [("fan_in", 1.0), ("kaiming_normal", math.sqrt(2))])
def test_the_two_rules_that_the_original_only_names(method, gain):
    refused = [case["overrides"]["init_fn"] for case in CASES if "raises" in case]
    assert method in refused
    config, _ = config_from_original(
        ORIGINAL_DEFAULTS | {"init_fn": method, "n_layers": 2, "embedding_size": None, "vocab_size": 1000}
    )
    for name, parameter in fresh_model(config).named_parameters():
        if parameter.ndim == 2:
            expected = gain / math.sqrt(parameter.shape[1])
            assert parameter.std().item() == pytest.approx(expected, rel=6 / math.sqrt(2 * parameter.numel())), name


def test_seed_decides_and_nothing_else():
    config = tiny_config()
    torch.manual_seed(1)
    first = fresh_model(config, seed=3).state_dict()
    torch.manual_seed(2)
    second, other = fresh_model(config, seed=3).state_dict(), fresh_model(config, seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    changed = [name for name in first if first[name].ndim == 2]
    assert not any(torch.equal(first[name], other[name]) for name in changed)


def test_no_two_blocks_of_rows_are_alike():
    config = tiny_config(vocab_size=4 * ROWS_PER_BLOCK)
    model = fresh_model(config)
    blocks = [
        block
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight)
        for block in weight.detach().split(ROWS_PER_BLOCK)
    ]
    assert len(blocks) == 8
    assert len({tuple(block.flatten().tolist()) for block in blocks}) == 8


def test_building_on_meta_and_filling_later_gives_the_same(tmp_path):
    args = ModelArgs(config=TINY | {"tie_word_embeddings": True, "init_cutoff_factor": 3.0})
    expected = build_model(args, seed=5)
    late = build_model(args, seed=5, device="meta")
    assert late.lm_head.weight.is_meta
    late.to_empty(device="cpu")
    initialize_weights(late, seed=5)
    assert late.lm_head.weight is late.model.embed_tokens.weight
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, dict(late.named_parameters())[name]), name


# Sizes that no number of ranks divides evenly, and more rows than one block.
UNEVEN = TINY | {"vocab_size": 2 * ROWS_PER_BLOCK + 101, "intermediate_size": 67, "attention_bias": True}


def worker(rank, folder, mesh_shape, settings):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=math.prod(mesh_shape),
        timeout=timedelta(seconds=120),
    )
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    model = build_model(ModelArgs(config=settings), seed=7, device="meta")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    initialize_weights(model, seed=7)
    whole = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    if rank == 0:
        save_file(whole, f"{folder}/whole.safetensors")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mesh_shape", "tied"),
    [
        ((2,), False),
        pytest.param((3,), True, marks=pytest.mark.slow),
        pytest.param((2, 2), False, marks=pytest.mark.slow),
    ],
    ids=["fsdp2", "fsdp3_tied", "hsdp"],
)
def test_every_sharding_starts_from_the_same_weights(tmp_path, mesh_shape, tied):
    settings = UNEVEN | {"tie_word_embeddings": tied}
    given = str(tmp_path), mesh_shape, settings
    mp.start_processes(worker, args=given, nprocs=math.prod(mesh_shape), start_method="forkserver")
    expected = dict(build_model(ModelArgs(config=settings), seed=7).named_parameters())
    found = load_file(tmp_path / "whole.safetensors")
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name
