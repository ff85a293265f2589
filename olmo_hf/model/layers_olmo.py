"""The parts of an OLMo layer: norm, positions, attention, MLP and the layer itself.

Self-contained: torch and transformers only (this file travels beside checkpoints that stock transformers lacks).

Shapes in trailing comments: `B` batch, `S` query positions, `T` key positions, `D` hidden size, `H` heads, `K` key and
value heads, `C` head size, `N` documents per row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_olmo import OlmoHfConfig
from .training_ops import RMSNorm, Rotation, SwiGLU, may_use_own_backward

# Backends that are told who may attend to whom by a mask; the flash family is told by document boundaries.
BACKENDS_WITH_MASKS = ("eager", "sdpa", "flex_attention")


class OlmoHfNorm(nn.Module):
    """RMSNorm, LayerNorm or low-precision LayerNorm over the last axis, with or without weight and bias."""

    def __init__(self, config: OlmoHfConfig, size: int, affine: bool):
        super().__init__()
        self.kind, self.size, self.eps = config.norm_type, size, config.rms_norm_eps
        self.weight = nn.Parameter(torch.ones(size)) if affine else None
        self.bias = nn.Parameter(torch.zeros(size)) if affine and config.norm_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., size) -> the same, in the dtype of x
        dtype, device_type = x.dtype, x.device.type
        if self.kind == "low_precision_layer":
            autocast = torch.is_autocast_enabled(device_type)
            low = torch.get_autocast_dtype(device_type) if autocast else dtype
            weight, bias = (p if p is None else p.to(low) for p in (self.weight, self.bias))
            with torch.autocast(device_type, enabled=False):
                return F.layer_norm(x.to(low), (self.size,), weight, bias, self.eps).to(dtype)
        if self.kind == "rms" and self.bias is None and may_use_own_backward(x):
            return RMSNorm.apply(x, self.weight, self.eps)
        x = x.float()
        if self.kind == "layer":
            weight, bias = (p if p is None else p.float() for p in (self.weight, self.bias))
            return F.layer_norm(x, (self.size,), weight, bias, self.eps).to(dtype)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        # The weight acts in fp32 and the cast comes last, as in transformers' Olmo2RMSNorm.
        if self.weight is not None:
            x = self.weight * x
        if self.bias is not None:
            x = x + self.bias
        return x.to(dtype)

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.size}, eps={self.eps}, affine={self.weight is not None}"


class OlmoHfRotaryEmbedding(nn.Module):
    """Cosine and sine tables of RoPE (arXiv:2104.09864), half-split layout.

    The frequencies are a plain attribute made on the CPU, not a buffer: nothing casts, shards, synchronises or forgets
    them (a buffer set in `__init__` is garbage after a meta-device `from_pretrained`).
    """

    def __init__(self, config: OlmoHfConfig):
        super().__init__()
        rope: dict[str, Any] = config.rope_parameters  # type: ignore[assignment]
        if rope["rope_type"] == "default":
            exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
            self.frequencies, self.attention_scaling = 1.0 / (rope["rope_theta"] ** exponents), 1.0
        else:
            self.frequencies, self.attention_scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device="cpu")
        self.cpu_frequencies = self.frequencies
        self.full_precision = config.rope_full_precision

    @torch.no_grad()
    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        if self.frequencies.device != position_ids.device:
            self.frequencies = self.cpu_frequencies.to(position_ids.device)  # once, not in every step
        angles = position_ids[..., None].float() * self.frequencies  # (B, S, C/2)
        angles = torch.cat((angles, angles), dim=-1)  # (B, S, C)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return (cos, sin) if self.full_precision else (cos.to(dtype), sin.to(dtype))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads (B, H, S, C) by tables (B, S, C). fp32 tables promote the arithmetic; the dtype of x returns."""
    if may_use_own_backward(x):
        return Rotation.apply(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * cos[:, None] + turned * sin[:, None]).to(x.dtype)


def alibi_bias(
    config: OlmoHfConfig, query_positions: torch.Tensor, key_length: int, dtype: torch.dtype
) -> torch.Tensor:
    """ALiBi (arXiv:2108.12409) as the original OLMo trainer has it: `-|i - j| * 2**(-h * max / H)`, heads from 1.

    Returns (1, H, S, T), to be added to the attention scores.
    """
    device, heads = query_positions.device, config.num_attention_heads
    exponents = torch.arange(1, heads + 1, device=device, dtype=torch.float32) * (config.alibi_bias_max / heads)
    distance = (query_positions[:, None] - torch.arange(key_length, device=device)[None, :]).abs()  # (S, T)
    return (-distance * torch.exp2(-exponents)[:, None, None])[None].to(dtype)


def check_doc_lens(doc_lens: torch.Tensor, rows: int, length: int) -> None:
    """Refuse document lengths that are not (B, N) whole numbers which fill their rows.

    Raises:
        ValueError: what is wrong; values are looked at on the CPU only, where that costs no synchronisation.
    """
    is_matrix = doc_lens.ndim == 2 and doc_lens.shape[0] == rows and doc_lens.shape[1] > 0
    if not is_matrix or doc_lens.is_floating_point():
        found = f"{doc_lens.dtype} of shape {tuple(doc_lens.shape)}"
        raise ValueError(f"doc_lens must be whole numbers of shape ({rows}, documents), found {found}")
    if doc_lens.device.type == "cpu":
        if not bool((doc_lens.sum(-1) == length).all()):
            raise ValueError(f"doc_lens must add up to {length}, the row length; found {doc_lens.sum(-1).tolist()}")
        if bool((doc_lens < 0).any()):
            raise ValueError(f"doc_lens must not be negative, found {doc_lens.min()}")


def document_positions(doc_lens: torch.Tensor, length: int) -> torch.Tensor:
    """Positions (B, S) that restart in every document, from document lengths (B, N) padded with 0 on the right."""
    ends = doc_lens.cumsum(-1)  # (B, N)
    positions = torch.arange(length, device=doc_lens.device).expand(doc_lens.shape[0], length).contiguous()
    document = torch.searchsorted(ends, positions, right=True).clamp(max=doc_lens.shape[1] - 1)
    return positions - (ends - doc_lens).gather(1, document)


def varlen_kwargs(doc_lens: torch.Tensor, max_doc_lens: Sequence[int] | None) -> dict[str, Any]:
    """What flash attention needs to keep documents apart: boundaries in the flattened batch and the longest length."""
    lengths = doc_lens.flatten()
    boundaries = F.pad(lengths[lengths > 0].cumsum(0, dtype=torch.int32), (1, 0))  # (documents + 1,)
    longest = int(doc_lens.max()) if max_doc_lens is None else max(max_doc_lens)
    return {
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written out; the only backend that returns its weights (B, H, S, T)."""
    groups = int(module.num_key_value_groups)  # type: ignore[arg-type]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))  # (B, H, T, C)
    scores = query @ key.transpose(-1, -2) * scaling  # (B, H, S, T)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    output = F.dropout(weights, p=dropout, training=module.training) @ value
    return output.transpose(1, 2).contiguous(), weights  # (B, S, H, C)


class OlmoHfAttention(nn.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, config: OlmoHfConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.hidden_size // config.key_value_width
        self.scaling = self.head_dim**-0.5
        # Read in every pass, and reading a configuration takes a dozen calls.
        self.clip_qkv, self.has_qk_norm = config.clip_qkv, config.qk_norm
        width, kv_width, bias = config.hidden_size, config.key_value_width, config.attention_bias
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, kv_width, bias=bias)
        self.v_proj = nn.Linear(width, kv_width, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=bias)
        if config.qk_norm:
            self.q_norm = OlmoHfNorm(config, width, config.qk_norm_affine)
            self.k_norm = OlmoHfNorm(config, kv_width, config.qk_norm_affine)

    def forward(
        self, hidden_states: torch.Tensor, past_key_values: Cache | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        projections = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (proj(hidden_states) for proj in projections)  # (B, S, D), (B, S, K*C) twice
        return self.attend(query, key, value, past_key_values=past_key_values, **kwargs)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Everything between the input projections and the residual stream: the part worth recomputing."""
        if self.clip_qkv is not None:
            bound = self.clip_qkv
            query, key, value = (x.clamp(min=-bound, max=bound) for x in (query, key, value))
        if self.has_qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        batch, length = query.shape[:2]
        query, key, value = (x.view(batch, length, -1, self.head_dim).transpose(1, 2) for x in (query, key, value))
        if position_embeddings is not None:
            query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        dropout = self.config.attention_dropout if self.training else 0.0
        output, weights = attention(self, query, key, value, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(output.reshape(batch, length, -1).contiguous()), weights


class OlmoHfMLP(nn.Module):
    """Feed-forward network: gated (SwiGLU, arXiv:2002.05202) or plain."""

    def __init__(self, config: OlmoHfConfig):
        super().__init__()
        self.activation, self.is_swiglu = ACT2FN[config.hidden_act], config.hidden_act == "silu"
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias) if config.mlp_gated else None
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = None if self.gate_proj is None else self.gate_proj(x)
        return self.down_proj(self.activate(gate, self.up_proj(x)))

    def activate(self, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
        if gate is None:
            return self.activation(up)
        if self.is_swiglu and may_use_own_backward(gate):
            return SwiGLU.apply(gate, up)
        return self.activation(gate) * up


class OlmoHfDecoderLayer(GradientCheckpointingLayer):
    """Attention and MLP on a residual stream. OLMo-2 normalises what a branch gives, OLMo-1 what it takes."""

    def __init__(self, config: OlmoHfConfig, layer_idx: int):
        super().__init__()
        self.dropout = config.residual_dropout
        self.self_attn = OlmoHfAttention(config, layer_idx)
        self.mlp = OlmoHfMLP(config)
        self.norm_position = config.norm_position
        norms = [OlmoHfNorm(config, config.hidden_size, config.norm_affine) for _ in range(2)]
        if config.norm_position == "post":
            self.post_attention_layernorm, self.post_feedforward_layernorm = norms
        else:
            self.input_layernorm, self.pre_feedforward_layernorm = norms

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # (B, S, D) -> the same
        if self.norm_position == "post":
            attended = self.post_attention_layernorm(self.self_attn(hidden_states, **kwargs)[0])
            hidden_states = hidden_states + self._drop(attended)
            return hidden_states + self._drop(self.post_feedforward_layernorm(self.mlp(hidden_states)))
        attended = self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        hidden_states = hidden_states + self._drop(attended)
        return hidden_states + self._drop(self.mlp(self.pre_feedforward_layernorm(hidden_states)))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, p=self.dropout, training=self.training)
