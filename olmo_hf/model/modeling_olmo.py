"""OLMo models for PyTorch, with the parameter names of `transformers`' own `olmo2`.

Self-contained: torch and transformers only (this file travels beside checkpoints that stock transformers lacks).

Shapes in trailing comments: `B` batch, `S` query positions, `T` key positions, `D` hidden size, `H` heads, `K` key and
value heads, `C` head size, `V` vocabulary, `N` documents per row.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_olmo import OlmoHfConfig, copy_code

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
        self.full_precision = config.rope_full_precision

    @torch.no_grad()
    def forward(self, position_ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self.frequencies.to(position_ids.device)  # (B, S, C/2)
        angles = torch.cat((angles, angles), dim=-1)  # (B, S, C)
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return (cos, sin) if self.full_precision else (cos.to(dtype), sin.to(dtype))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads (B, H, S, C) by tables (B, S, C). fp32 tables promote the arithmetic; the dtype of x returns."""
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


def document_positions(doc_lens: torch.Tensor, length: int) -> torch.Tensor:
    """Positions (B, S) that restart in every document, from document lengths (B, N) padded with 0 on the right."""
    ends = doc_lens.cumsum(-1)  # (B, N)
    if doc_lens.device.type == "cpu" and not bool((ends[:, -1] == length).all()):
        # Only where looking at values costs no synchronisation.
        raise ValueError(f"doc_lens must add up to {length}, the row length; found {ends[:, -1].tolist()}")
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
        if self.config.clip_qkv is not None:
            bound = self.config.clip_qkv
            query, key, value = (x.clamp(min=-bound, max=bound) for x in (query, key, value))
        if self.config.qk_norm:
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
        self.activation = ACT2FN[config.hidden_act]
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias) if config.mlp_gated else None
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = None if self.gate_proj is None else self.gate_proj(x)
        return self.down_proj(self.activate(gate, self.up_proj(x)))

    def activate(self, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
        return self.activation(up) if gate is None else self.activation(gate) * up


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


class OlmoHfPreTrainedModel(PreTrainedModel):
    """What the bare model and the causal language model share."""

    config: OlmoHfConfig
    config_class = OlmoHfConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["OlmoHfDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": OlmoHfDecoderLayer, "attentions": OlmoHfAttention}

    def post_init(self) -> None:
        # `_init_weights` is told no names, and the depth of a layer is part of some rules: note the std on the module.
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.initial_std = self.config.initial_std(name, module.weight.shape[1])  # type: ignore[assignment]
        super().post_init()

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Identical to the parent's, but the code goes along where stock transformers lacks the architecture."""
        if self.config.stock_model_type is None and kwargs.get("is_main_process", True):
            copy_code(Path(__file__).parent, Path(save_directory))
        super().save_pretrained(save_directory, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        """Draws from torch's default generator (`olmo_hf.model.init` draws alike for every sharding)."""
        if isinstance(module, OlmoHfNorm):
            if module.weight is not None:
                init.ones_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Linear | nn.Embedding):
            std, cutoff = getattr(module, "initial_std", self.config.initializer_range), self.config.init_cutoff
            if cutoff is None:
                init.normal_(module.weight, std=std)
            else:
                init.trunc_normal_(module.weight, std=std, a=-cutoff * std, b=cutoff * std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)


class OlmoHfModel(OlmoHfPreTrainedModel):
    """The decoder without the language-model head."""

    def __init__(self, config: OlmoHfConfig):
        super().__init__(config)
        self.vocab_size = config.vocab_size
        # No padding_idx: the padding row is a row like any other and gets its gradient, as in the original.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OlmoHfDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = OlmoHfNorm(config, config.hidden_size, config.norm_affine)
        if config.embedding_norm:
            self.embed_norm = OlmoHfNorm(config, config.hidden_size, config.norm_affine)
        if config.position_embedding == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        if config.position_embedding == "rope":
            self.rotary_emb = OlmoHfRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        doc_lens: torch.Tensor | None = None,
        max_doc_lens: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """See `OlmoHfForCausalLM.forward`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)  # (B, S, D)
        length, device = inputs_embeds.shape[1], inputs_embeds.device

        mask_positions = position_ids
        if doc_lens is not None:
            if attention_mask is not None or past_key_values is not None:
                raise ValueError("doc_lens excludes attention_mask and past_key_values: packed rows have neither")
            doc_lens = doc_lens.to(device)
            mask_positions = document_positions(doc_lens, length)
            if position_ids is None and self.config.reset_document_positions:
                position_ids = mask_positions
            if self.config._attn_implementation not in BACKENDS_WITH_MASKS:
                kwargs |= varlen_kwargs(doc_lens, max_doc_lens)
        elif use_cache and past_key_values is None and not self.training:
            # Packed rows and training steps have no use for a cache, and transformers stops looking for packing when
            # there is one.
            past_key_values = DynamicCache(config=self.config)

        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None:
            position_ids = (torch.arange(length, device=device) + seen)[None]  # (1, S)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids if mask_positions is None else mask_positions,
        )
        hidden_states = self._embed(inputs_embeds, position_ids)
        positions = self._position_kwargs(hidden_states, position_ids, past_key_values)
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states = layer(
                hidden_states,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **positions,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)

    def _embed(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Embedding norm, learned positions and dropout, in this order."""
        hidden_states = self.embed_norm(inputs_embeds) if self.config.embedding_norm else inputs_embeds
        if self.config.position_embedding == "learned":
            hidden_states = hidden_states + self.embed_positions(position_ids)
        return F.dropout(hidden_states, p=self.config.embedding_dropout, training=self.training)

    def _position_kwargs(
        self, hidden_states: torch.Tensor, position_ids: torch.Tensor, past_key_values: Cache | None
    ) -> dict[str, Any]:
        """What every layer must know about positions: RoPE tables, ALiBi bias or nothing."""
        if self.config.position_embedding == "rope":
            return {"position_embeddings": self.rotary_emb(position_ids, hidden_states.dtype)}
        if self.config.position_embedding == "learned":
            return {}
        if self.config._attn_implementation not in BACKENDS_WITH_MASKS:
            raise ValueError(f"ALiBi needs attn_implementation in {BACKENDS_WITH_MASKS}: others take no position bias")
        batch, length = hidden_states.shape[:2]
        seen, key_length = 0, length
        if past_key_values is not None:
            seen, (key_length, _) = past_key_values.get_seq_length(), past_key_values.get_mask_sizes(length, 0)
        # Distances between places in the row, not between position_ids: padding shifts both ends alike.
        queries = torch.arange(length, device=hidden_states.device) + seen
        bias = alibi_bias(self.config, queries, key_length, hidden_states.dtype)
        return {"position_bias": bias.expand(batch, -1, -1, -1)}


class OlmoHfForCausalLM(OlmoHfPreTrainedModel, GenerationMixin):
    """The language model: decoder and head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # type: ignore[dict-item]
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: OlmoHfConfig):
        super().__init__(config)
        self.model = OlmoHfModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self.post_init()
        self._suppress_padding_ids()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        doc_lens: torch.Tensor | None = None,
        max_doc_lens: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, S, V), padding columns included, and with `labels` (B, S, unshifted) the mean cross-entropy.

        Args:
            attention_mask: (B, T) with 1 for tokens and 0 for padding, or a ready (B, 1 or H, S, T) mask, boolean
                (True attends) or additive.
            doc_lens: (B, N) lengths of the documents packed in each row, padded with 0 on the right and adding up to
                S: tokens attend within their document only. Positions go on counting through the row unless
                `config.reset_document_positions`. Excludes `attention_mask` and a cache.
            max_doc_lens: the longest document of each row; spares flash attention a device synchronisation.
            logits_to_keep: 0 for all positions, k for the last k, or indices.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            doc_lens=doc_lens,
            max_doc_lens=max_doc_lens,
            **kwargs,
        )
        logits = self.compute_logits(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:  # (..., D) -> (..., V)
        """The head, with the scaling that `scale_logits` asks for."""
        logits = self.lm_head(hidden_states)
        return logits * self.config.hidden_size**-0.5 if self.config.scale_logits else logits

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Identical to the parent's, but the first `new_num_tokens` ids count as real and the rest as padding."""
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if new_num_tokens is not None:
            self.config.tokenizer_vocab_size = new_num_tokens
            self._suppress_padding_ids()
        return embeddings

    def _suppress_padding_ids(self) -> None:
        """Padding rows of the vocabulary have logits but no token: `generate`, stock too, must not pick them."""
        real, total = self.config.tokenizer_vocab_size, self.config.vocab_size
        if self.generation_config is not None:
            ids = [] if real is None else list(range(real, total))
            self.generation_config.suppress_tokens = ids if ids else None
