"""Which activations are recomputed in the backward pass: the strategies of the original OLMo trainer."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from olmo_hf.errors import ConfigError
from olmo_hf.model.layers_olmo import OlmoHfDecoderLayer
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM

# Whole layers: layer index -> recomputed or not.
_LAYER_RULES: dict[str, Callable[[int], bool]] = {
    "whole_layer": lambda index: True,
    "one_in_two": lambda index: index % 2 == 0,
    "one_in_three": lambda index: index % 3 == 0,
    "one_in_four": lambda index: index % 4 == 0,
    "one_in_eight": lambda index: index % 8 == 0,
    "two_in_three": lambda index: index % 3 != 0,
    "three_in_four": lambda index: index % 4 != 0,
}
STRATEGIES = (*_LAYER_RULES, "fine_grained")


def apply_activation_checkpointing(model: OlmoHfForCausalLM, strategy: str) -> None:
    """Switch a strategy on, in place. Gradients stay the same; memory falls, time rises.

    `fine_grained` keeps the outputs of the large projections and recomputes norms, the attention core with its output
    projection, and the activation function; the other strategies recompute whole layers.

    Raises:
        ConfigError: no strategy has this name.
    """
    if strategy not in STRATEGIES:
        raise ConfigError(
            f"model.activation_checkpointing: found {strategy!r}, expected one of {', '.join(STRATEGIES)} or null"
        )
    config = model.config
    dropout = config.attention_dropout, config.residual_dropout, config.embedding_dropout
    # Saving the random state costs a device synchronisation and matters only where something random is recomputed.
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=any(p > 0 for p in dropout))
    for index, layer in enumerate(model.model.layers):
        if strategy == "fine_grained":
            _recompute_small_parts(layer, run)
        elif _LAYER_RULES[strategy](index):
            layer._gradient_checkpointing_func = run
            layer.gradient_checkpointing = True


def _recompute_small_parts(layer: OlmoHfDecoderLayer, run: Callable[..., Any]) -> None:
    if layer.norm_position == "post":
        norms = layer.post_attention_layernorm, layer.post_feedforward_layernorm
    else:
        norms = layer.input_layernorm, layer.pre_feedforward_layernorm
    parts = [(norm, "forward") for norm in norms] + [(layer.self_attn, "attend"), (layer.mlp, "activate")]
    for owner, method in parts:
        setattr(owner, method, _recomputed(getattr(owner, method), owner, run))


def _recomputed(function: Callable[..., Any], module: torch.nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return function(*args, **kwargs)
        return run(function, *args, **kwargs)

    return recomputed
