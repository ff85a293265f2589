"""How large a model is and what a token costs, exactly and from the configuration alone.

Conventions of the original OLMo trainer: token and position embeddings do not count as `non_embedding`, an untied head
does; FLOPs are per token at a given sequence length, multiply and add counted separately.
"""

from dataclasses import dataclass

from olmo_hf.model.configuration_olmo import OlmoHfConfig


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters; tied weights count once."""

    total: int
    embedding: int
    """Token embedding and learned positions."""
    per_layer: int

    @property
    def non_embedding(self) -> int:
        return self.total - self.embedding


@dataclass(frozen=True)
class FlopsPerToken:
    """Floating-point operations for one token of a sequence."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


def count_parameters(config: OlmoHfConfig) -> ParameterCount:
    """Count the parameters of `OlmoHfForCausalLM(config)` without building it."""
    width, inner = config.hidden_size, config.intermediate_size
    kv_width = config.key_value_width
    norm_tensors = 1 + int(config.norm_bias)
    norm = width * norm_tensors * int(config.norm_affine)

    attention = 2 * width * width + 2 * width * kv_width + int(config.attention_bias) * (2 * width + 2 * kv_width)
    qk_norm = (width + kv_width) * norm_tensors * int(config.qk_norm and config.qk_norm_affine)
    mlp = (3 if config.mlp_gated else 2) * width * inner
    mlp_bias = int(config.mlp_bias) * ((2 if config.mlp_gated else 1) * inner + width)
    per_layer = attention + qk_norm + mlp + mlp_bias + 2 * norm

    embedding = config.vocab_size * width
    if config.position_embedding == "learned":
        embedding += config.max_position_embeddings * width
    head = 0 if config.tie_word_embeddings else config.vocab_size * (width + int(config.lm_head_bias))
    norms = norm * (1 + int(config.embedding_norm))
    total = embedding + config.num_hidden_layers * per_layer + norms + head
    return ParameterCount(total=total, embedding=embedding, per_layer=per_layer)


def flops_per_token(config: OlmoHfConfig, sequence_length: int) -> FlopsPerToken:
    """FLOPs of one token as the original counts them (spec: model.md section 13).

    Forward: 2 per non-embedding parameter and `4 * layers * width * sequence_length` for attention. Backward: 4 per
    parameter, embeddings included, and twice the attention term.
    """
    count = count_parameters(config)
    attention = 4 * config.num_hidden_layers * config.hidden_size * sequence_length
    return FlopsPerToken(forward=2 * count.non_embedding + attention, backward=4 * count.total + 2 * attention)


def describe_model(config: OlmoHfConfig, sequence_length: int) -> list[tuple[str, str]]:
    """Rows (label, value) of the table printed at the start."""
    count, flops = count_parameters(config), flops_per_token(config, sequence_length)
    tokens = config.vocab_size if config.tokenizer_vocab_size is None else config.tokenizer_vocab_size
    shape = f"{config.num_hidden_layers} layers of width {config.hidden_size}, {config.num_attention_heads} heads"
    return [
        ("model", f"{count.total:,} parameters ({count.non_embedding:,} without embeddings): {shape}"),
        ("vocabulary", f"{config.vocab_size:,} rows for {tokens:,} tokens"),
        ("arithmetic", f"{flops.total:,} floating-point operations per token, forward and backward"),
    ]
