"""Logits of a checkpoint computed layer by layer, so that proving a conversion needs the memory of one layer."""

import torch
from transformers.masking_utils import create_causal_mask

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.conversion.lazy import LazyTable
from olmo_hf.model.layers_olmo import OlmoHfDecoderLayer
from olmo_hf.model.modeling_olmo import OlmoHfModel


@torch.no_grad()
def streamed_logits(config: OlmoHfConfig, weights: LazyTable, input_ids: torch.Tensor) -> torch.Tensor:
    """Logits (B, S, V) in fp32.

    Args:
        config: the architecture.
        weights: all parameters by our names (a tied head may be left out).
        input_ids: (B, S) with S up to `max_position_embeddings`.
    """
    config = OlmoHfConfig(**config.to_init_dict())
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        shell = OlmoHfModel(OlmoHfConfig(**(config.to_init_dict() | {"num_hidden_layers": 0}))).eval()
        layer = OlmoHfDecoderLayer(config, 0).eval()
    shell.config = config
    for name, module in shell.named_children():
        if name not in ("layers", "rotary_emb"):
            _fill(module, f"model.{name}.", weights)
    embedded = shell.embed_tokens(input_ids)
    positions = torch.arange(input_ids.shape[1])[None]
    mask = create_causal_mask(
        config=config, inputs_embeds=embedded, attention_mask=None, past_key_values=None, position_ids=positions
    )
    hidden_states = shell._embed(embedded, positions)
    where = shell._position_kwargs(hidden_states, positions, None)
    for index in range(config.num_hidden_layers):
        _fill(layer, f"model.layers.{index}.", weights)
        hidden_states = layer(hidden_states, attention_mask=mask, **where)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    logits = shell.norm(hidden_states) @ weights[head].read().float().T
    if config.lm_head_bias:
        logits = logits + weights["lm_head.bias"].read().float()
    return logits * config.hidden_size**-0.5 if config.scale_logits else logits


def _fill(module: torch.nn.Module, prefix: str, weights: LazyTable) -> None:
    state = {name: weights[prefix + name].read().float() for name, _ in module.named_parameters()}
    module.load_state_dict(state, assign=True)
