"""Head and loss in one inside real models: same loss, same gradients, same weights on shards."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM

from olmo_hf.errors import ConfigError
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.training.loss_in_model import LossSettings, loss_settings, model_loss_sums

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 128,
}


def build(kind):
    torch.manual_seed(0)
    if kind == "stock":
        return Olmo2ForCausalLM(Olmo2Config(**SIZES))
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES))
    changes = {
        "ours": {},
        "tied": {"tie_word_embeddings": True},
        "scaled": {"scale_logits": True},
        "biased": {"lm_head_bias": True},
    }
    return OlmoHfForCausalLM(OlmoHfConfig(**SIZES, **changes[kind]))


def ragged_batch():
    """Eight rows of 16 tokens; row i has labels on its last 2 + i targets only: 44 in all."""
    tokens = torch.randint(128, (8, 16), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    for row in range(8):
        labels[row, : 16 - (2 + row)] = -100
    return tokens, labels


def gradients(model, settings, tokens, labels, factor=1 / 44):
    model.zero_grad()
    terms, _ = model_loss_sums(model, {"input_ids": tokens, "use_cache": False}, labels, settings)
    (terms.total * factor).backward()
    return terms, {name: parameter.grad for name, parameter in model.named_parameters()}


PLAIN = LossSettings("plain", 1e-4, 1024)


@pytest.mark.parametrize("kind", ["ours", "tied", "scaled", "biased", "stock"])
def test_the_same_loss_and_gradients(kind):
    model, (tokens, labels) = build(kind), ragged_batch()
    settings = loss_settings(model, implementation="auto", z_loss_weight=1e-4, chunk_tokens=7)
    assert settings == LossSettings("chunked", 1e-4, 7)
    expected, expected_gradients = gradients(copy.deepcopy(model), PLAIN, tokens, labels)
    terms, found = gradients(model, settings, tokens, labels)
    for part in ("total", "ce_sum", "z_sum", "num_labels"):
        torch.testing.assert_close(getattr(terms, part), getattr(expected, part), rtol=1e-6, atol=0.0, msg=part)
    assert terms.num_labels.item() == 44
    assert set(found) == set(expected_gradients)
    for name, gradient in found.items():
        assert (gradient - expected_gradients[name]).abs().max() <= 1e-6, name


def test_the_head_is_itself_again_afterwards_and_after_an_error():
    model, (tokens, labels) = build("ours"), ragged_batch()
    settings = LossSettings("chunked", 0.0, 7)
    model_loss_sums(model, {"input_ids": tokens}, labels, settings)
    assert model(input_ids=tokens).logits.shape == (8, 16, 128)
    with pytest.raises(TypeError):
        model_loss_sums(model, {"input_ids": tokens, "nonsense": 1, "logits_to_keep": "x"}, labels, settings)
    assert model(input_ids=tokens).logits.shape == (8, 16, 128)


def test_models_whose_logits_are_not_the_heads_keep_the_plain_loss():
    settings = loss_settings(build("llama"), implementation="auto", z_loss_weight=0.0, chunk_tokens=7)
    assert settings.implementation == "plain"
    with pytest.raises(ConfigError, match="finished logits only"):
        loss_settings(build("llama"), implementation="chunked", z_loss_weight=0.0, chunk_tokens=7)


def test_a_head_that_must_stay_as_it_is_keeps_the_plain_loss():
    options = {"implementation": "auto", "z_loss_weight": 0.0, "chunk_tokens": 7}
    assert loss_settings(build("ours"), **options, keep_head=True).implementation == "plain"


def test_memory_stays_below_one_set_of_logits(peak_bytes):
    config = OlmoHfConfig(**{**SIZES, "vocab_size": 32_768, "num_hidden_layers": 1})
    model = OlmoHfForCausalLM(config)
    tokens = torch.randint(128, (2, 256), generator=torch.Generator().manual_seed(1))
    all_logits = tokens.numel() * config.vocab_size * 4  # 67 MB
    peaks = {}
    for implementation in ("plain", "chunked"):
        settings = LossSettings(implementation, 1e-4, 32)

        def step(settings=settings):
            model.zero_grad()
            model_loss_sums(model, {"input_ids": tokens, "use_cache": False}, tokens, settings)[0].total.backward()

        step()  # so that the parameters' gradients are not counted as new
        peaks[implementation] = peak_bytes(step)
    assert peaks["plain"] > 2 * all_logits
    assert peaks["chunked"] < 0.5 * all_logits


def one_step(model, implementation, *, silent, rank, world_size):
    """One SGD step of lr 1 on the ragged batch, split over ranks; what is returned are whole weights.

    With `silent` the second half of the rows, all that the second of two ranks has, is without a label.
    """
    tokens, labels = ragged_batch()
    if silent:
        labels[4:] = -100
    num_labels = int((labels[:, 1:] != -100).sum())
    assert num_labels == (14 if silent else 44)
    share = slice(rank * 8 // world_size, (rank + 1) * 8 // world_size)
    parameters = list(model.parameters())
    gradients(model, LossSettings(implementation, 1e-4, 7), tokens[share], labels[share], world_size / num_labels)
    torch.optim.SGD(parameters, lr=1.0).step()
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]
    return torch.cat([tensor.detach().flatten() for tensor in whole])


def spread_step(rank, kind, implementation, silent):
    model = build("ours")
    if kind == "ddp":
        return one_step(DistributedDataParallel(model), implementation, silent=silent, rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if kind == "fsdp_head":  # a policy by size may make the head a unit of its own
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return one_step(model, implementation, silent=silent, rank=rank, world_size=2)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp_head"])
@pytest.mark.parametrize("implementation", ["plain", "chunked"])
@pytest.mark.parametrize("silent", [False, True], ids=["labels", "silent_rank"])
def test_two_ranks_with_unequal_labels_take_the_step_of_one(two_ranks, kind, implementation, silent):
    expected = one_step(build("ours"), "plain", silent=silent, rank=0, world_size=1)
    for found in two_ranks(spread_step, kind, implementation, silent):
        assert (found - expected).abs().max() <= 1e-6


def test_only_linear_heads_are_lent_a_forward():
    model = build("ours")
    model.set_output_embeddings(nn.Sequential(nn.Linear(32, 128, bias=False)))
    options = {"z_loss_weight": 0.0, "chunk_tokens": 7}
    assert loss_settings(model, implementation="auto", **options).implementation == "plain"
