"""OLMo models for PyTorch, with the parameter names of `transformers`' own `olmo2`.

Self-contained: torch and transformers only (this file travels beside checkpoints that stock transformers lacks).

Shapes in trailing comments: `B` batch, `S` query positions, `T` key positions, `D` hidden size, `H` heads, `V`
vocabulary, `N` documents per row.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_olmo import OlmoHfConfig, copy_code
from .layers_olmo import (
    BACKENDS_WITH_MASKS,
    OlmoHfAttention,
    OlmoHfDecoderLayer,
    OlmoHfNorm,
    OlmoHfRotaryEmbedding,
    alibi_bias,
    check_doc_lens,
    document_positions,
    varlen_kwargs,
)


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
            check_doc_lens(doc_lens, inputs_embeds.shape[0], length)
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
        self._check_length(length, seen)
        if position_ids is None:
            position_ids = (torch.arange(length, device=device) + seen)[None]  # (1, S)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            # Only positions that may hold several documents: looking for them waits for the device.
            position_ids=mask_positions,
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

    def _check_length(self, length: int, seen: Any) -> None:
        """Learned positions end somewhere; a GPU would end the process without a word there."""
        most = self.config.max_position_embeddings
        if self.config.position_embedding == "learned" and isinstance(seen, int) and length + seen > most:
            raise ValueError(
                f"{length + seen} tokens, but there are {most} learned positions; shorten the input or ask for less"
            )

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
