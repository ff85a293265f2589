"""Memory of one device: the arithmetic, and the activations against what autograd really keeps."""

import dataclasses

import pytest
import torch

from olmo_hf.config_file import run_from_tree
from olmo_hf.model.args import ModelArgs
from olmo_hf.model.build import build_config, build_model
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.size import ParameterCount, count_parameters
from olmo_hf.recipes.activations import kept_bytes
from olmo_hf.recipes.memory import MemorySettings, estimate_memory, optimizer_bytes
from olmo_hf.recipes.plan import plan_run
from olmo_hf.recipes.table import memory_of, memory_rows

FIELDS = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
S = 16
COUNT = ParameterCount(total=1_000_000, embedding=100_000, per_layer=50_000)
SETTINGS = MemorySettings(
    num_devices=8,
    sharding="full",
    optimizer="adamw",
    bf16=True,
    loss_implementation="chunked",
    loss_chunk_tokens=1024,
    micro_batch_tokens=8192,
)


def really_kept(strategy: str | None, bf16: bool, batch: int) -> int:
    """Bytes of all storages that autograd keeps in a real forward pass of the trunk."""
    args = ModelArgs(config=FIELDS, activation_checkpointing=strategy, attn_implementation="sdpa")
    model = build_model(args, seed=0, max_position_embeddings=S).train()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        out = model.model(torch.zeros(batch, S, dtype=torch.long), use_cache=False)
    assert out.last_hidden_state.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", [None, "whole_layer", "one_in_two", "fine_grained"])
def test_activations_are_those_that_autograd_keeps(strategy, bf16):
    config = OlmoHfConfig(**FIELDS, max_position_embeddings=S)
    counted = kept_bytes(config, sequence_length=S, bf16=bf16, activation_checkpointing=strategy)
    real = really_kept(strategy, bf16, 4)
    assert counted.weight_copies + 4 * counted.per_instance == pytest.approx(real, rel=0.01)


def test_recomputation_saves():
    config = OlmoHfConfig(**FIELDS, max_position_embeddings=S)
    sizes = [
        kept_bytes(config, sequence_length=S, bf16=True, activation_checkpointing=strategy).per_instance
        for strategy in (None, "one_in_two", "whole_layer")
    ]
    assert sizes[0] > sizes[1] > sizes[2]


def estimate(**changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    return estimate_memory(
        settings, COUNT, num_layers=10, vocab_size=1000, activation_bytes=7_000, kept_copies_bytes=1_234
    )


def test_what_is_sharded_is_divided():
    full, alone = estimate(), estimate(num_devices=1, sharding="none")
    assert (alone.weights, alone.gradients, alone.optimizer) == (4_000_000, 4_000_000, 8_000_000)
    assert (full.weights, full.gradients, full.optimizer) == (500_000, 500_000, 1_000_000)
    assert alone.weight_copies == 1_234
    assert full.activations == alone.activations == 7_000


def test_ddp_keeps_gradients_twice():
    assert estimate(sharding="none").gradients == 8_000_000


def test_gathered_weights_stay_under_grad():
    assert estimate(sharding="grad").weight_copies == 2 * COUNT.total
    # Two layers, and what belongs to no layer.
    assert estimate().weight_copies == 2 * (2 * 50_000 + (1_000_000 - 10 * 50_000))


def test_logits_depend_on_the_loss():
    plain, chunked = estimate(loss_implementation="plain"), estimate()
    assert plain.logits == 8192 * 1000 * (2 + 4 + 4)
    assert chunked.logits == plain.logits // 8


@pytest.mark.parametrize(("name", "size"), [("adamw", 8_000_000), ("lion", 4_000_000), ("muon", 6_000_000)])
def test_optimizer(name, size):
    assert optimizer_bytes(name, COUNT, num_layers=10) == size


def test_the_table_of_a_run():
    run = run_from_tree(
        {
            "name": "x",
            "model": {"config": FIELDS},
            "data": {"paths": ["none.npy"], "sequence_length": S},
            "training": {"max_duration": 10, "global_train_batch_size": 8},
        }
    )
    plan = plan_run(run, num_processes=1)
    memory = memory_of(run, plan.config, plan.batch)
    assert memory.weights == 4 * count_parameters(build_config(run.model)).total
    assert memory.total == sum(dataclasses.astuple(memory))
    assert memory_rows(memory)[0][1].startswith("about 0.0 GB: weights 0.00")
