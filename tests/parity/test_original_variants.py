"""Every architecture of the original: logits, hidden states, losses, gradient norms and sizes equal its own numbers.

Tolerances are those measured for the golden data: logits move by up to 2.2e-6 between kernels of one machine, losses
by 2e-7 (relative), gradient norms by 4e-6 (relative); about five times that is allowed.
"""

import pytest
import torch
from torch.nn import functional as F

from olmo_hf.model.conversion.architecture import config_from_original, config_to_original
from olmo_hf.model.conversion.tensor_names import tensor_table
from olmo_hf.model.size import count_parameters, flops_per_token
from tests.parity.original import VARIANTS, load_variant, queries_with_keys

LOGITS_ATOL = 1e-5


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_hidden_states(name, attn_implementation):
    variant = load_variant(name, attn_implementation)
    with torch.no_grad():
        out = variant.model(variant.input_ids, attention_mask=variant.attention_mask, output_hidden_states=True)
    where = queries_with_keys(variant)
    torch.testing.assert_close(out.logits[where], variant.tensors["logits"][where], atol=LOGITS_ATOL, rtol=0)
    recorded = [key for key in variant.tensors if key.startswith("hidden_states.")]
    for key in recorded:
        ours = out.hidden_states[int(key.split(".")[1])]
        torch.testing.assert_close(ours, variant.tensors[key], atol=LOGITS_ATOL, rtol=0)
    assert recorded == [] or len(recorded) == len(out.hidden_states)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "olmo2_attnmask_left"])
def test_losses_and_gradient_norms(name):
    # olmo2_attnmask_left is left out: one of its losses lies on a query without keys, where kernels disagree by 100x.
    variant = load_variant(name)
    logits = variant.model(variant.input_ids, attention_mask=variant.attention_mask).logits[:, :-1]
    labels = variant.input_ids[:, 1:].clone()
    if variant.attention_mask is not None and variant.attention_mask.ndim == 2:
        labels[variant.attention_mask[:, 1:] == 0] = -100
    ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    # The original leaves ignored positions in the denominator of the z-loss.
    z = 1e-5 * (logits.logsumexp(-1).pow(2) * (labels != -100)).mean()
    assert ce.item() == pytest.approx(variant.facts["ce_mean_shifted"], rel=1e-6)
    assert z.item() == pytest.approx(variant.facts["z_loss_mean_1e5"], rel=1e-6)

    (ce + z).backward()
    gradients = {name: p.grad for name, p in variant.model.named_parameters()}
    table = tensor_table(variant.model.config, variant.layout)
    assert {entry.original for entry in table} == variant.facts["grad_l2_norm"].keys()
    for entry in table:
        norm = entry.fuse([gradients[name] for name in entry.ours]).norm().item()
        expected = variant.facts["grad_l2_norm"][entry.original]
        assert norm == pytest.approx(expected, rel=2e-5, abs=1e-7), entry.original


@pytest.mark.parametrize("name", VARIANTS)
def test_sizes(name):
    variant = load_variant(name)
    count = count_parameters(variant.model.config)
    flops = flops_per_token(variant.model.config, variant.model.config.max_position_embeddings)
    assert count.total == sum(p.numel() for p in variant.model.parameters()) == variant.facts["num_params"]
    assert count.non_embedding == variant.facts["num_params_no_embedding"]
    assert flops.forward == variant.facts["num_fwd_flops_per_token"]
    assert flops.backward == variant.facts["num_bck_flops_per_token"]


@pytest.mark.parametrize("name", VARIANTS)
def test_configuration_survives_the_way_there_and_back(name):
    config = load_variant(name).model.config
    again, layout = config_from_original(config_to_original(config))
    again.architectures = config.architectures
    assert again.to_dict() == config.to_dict()
    assert layout.block_group_size == 1
    assert not layout.separate_qkv
