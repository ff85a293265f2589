"""Which tensors of the original OLMo trainer are which of ours: one table, read in both directions.

Layout facts (spec: model.md section 2): the original fuses q, k, v into `att_proj` and up, gate (in this order) into
`ff_proj`; nothing is transposed or permuted.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.conversion.architecture import OriginalLayout


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of the original and the tensors of ours that it holds, stacked along the first axis."""

    original: str
    ours: tuple[str, ...]
    rows: tuple[int, ...]
    """Length of the first axis of each of ours."""

    def split(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Original -> ours; the results are views."""
        return dict(zip(self.ours, tensor.split(self.rows), strict=True))

    def fuse(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Ours, in the order of `self.ours`, -> original."""
        return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def tensor_table(config: OlmoHfConfig, layout: OriginalLayout | None = None) -> list[TensorEntry]:
    """Every parameter of the model, in the order of the forward pass."""
    layout = OriginalLayout() if layout is None else layout
    width, inner = config.hidden_size, config.intermediate_size
    norm_suffixes = (["weight"] if config.norm_affine else []) + (
        ["bias"] if config.norm_affine and config.norm_bias else []
    )
    entries = [TensorEntry("transformer.wte.weight", ("model.embed_tokens.weight",), (config.vocab_size,))]
    if config.position_embedding == "learned":
        rows = (config.max_position_embeddings,)
        entries.append(TensorEntry("transformer.wpe.weight", ("model.embed_positions.weight",), rows))
    if config.embedding_norm:
        entries += _tensors("transformer.emb_norm", ["model.embed_norm"], [width], norm_suffixes)
    for layer in range(config.num_hidden_layers):
        group, place = divmod(layer, layout.block_group_size)
        block = f"blocks.{layer}" if layout.block_group_size == 1 else f"block_groups.{group}.{place}"
        ours = f"model.layers.{layer}"
        for original, parts, rows_of_parts, suffixes in _block(config, layout, norm_suffixes, width, inner):
            names = [f"{ours}.{part}" for part in parts]
            entries += _tensors(f"transformer.{block}.{original}", names, rows_of_parts, suffixes)
    entries += _tensors("transformer.ln_f", ["model.norm"], [width], norm_suffixes)
    if not config.tie_word_embeddings:
        suffixes = ["weight", "bias"] if config.lm_head_bias else ["weight"]
        entries += _tensors("transformer.ff_out", ["lm_head"], [config.vocab_size], suffixes)
    return entries


def _block(
    config: OlmoHfConfig, layout: OriginalLayout, norm_suffixes: list[str], width: int, inner: int
) -> Iterator[tuple[str, list[str], list[int], list[str]]]:
    """(original module, our modules, rows of each, kinds of tensor) for the modules of one block."""
    qkv, qkv_rows = ["q_proj", "k_proj", "v_proj"], [width, config.key_value_width, config.key_value_width]
    attention = ["weight", "bias"] if config.attention_bias else ["weight"]
    mlp = ["weight", "bias"] if config.mlp_bias else ["weight"]
    if layout.separate_qkv:
        for name, rows in zip(qkv, qkv_rows, strict=True):
            yield name, [f"self_attn.{name}"], [rows], attention
    else:
        yield "att_proj", [f"self_attn.{name}" for name in qkv], qkv_rows, attention
    if config.qk_norm and config.qk_norm_affine:
        qk_suffixes = ["weight", "bias"] if config.norm_bias else ["weight"]
        yield "q_norm", ["self_attn.q_norm"], [width], qk_suffixes
        yield "k_norm", ["self_attn.k_norm"], [config.key_value_width], qk_suffixes
    yield "attn_out", ["self_attn.o_proj"], [width], attention
    post = config.norm_position == "post"
    yield "attn_norm", ["post_attention_layernorm" if post else "input_layernorm"], [width], norm_suffixes
    up = ["mlp.up_proj", "mlp.gate_proj"] if config.mlp_gated else ["mlp.up_proj"]
    yield "ff_proj", up, [inner] * len(up), mlp
    yield "ff_out", ["mlp.down_proj"], [width], mlp
    yield "ff_norm", ["post_feedforward_layernorm" if post else "pre_feedforward_layernorm"], [width], norm_suffixes


def _tensors(original: str, ours: list[str], rows: list[int], suffixes: list[str]) -> list[TensorEntry]:
    return [
        TensorEntry(f"{original}.{suffix}", tuple(f"{name}.{suffix}" for name in ours), tuple(rows))
        for suffix in suffixes
    ]
