"""The architecture of an OLMo model as a Hugging Face configuration.

Self-contained: `transformers` only (this file travels beside checkpoints that stock `transformers` cannot express).
"""

import copy
import dataclasses
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.olmo.configuration_olmo import OlmoConfig
from transformers.models.olmo2.configuration_olmo2 import Olmo2Config

CODE_FILES = ("configuration_olmo.py", "training_ops.py", "layers_olmo.py", "modeling_olmo.py")

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_STOCK_CONFIGS: dict[str, type[PreTrainedConfig]] = {"olmo2": Olmo2Config, "olmo": OlmoConfig}

# What the two architectures of stock `transformers` have in common, and what sets them apart.
_STOCK_COMMON = {
    "mlp_gated": True,
    "position_embedding": "rope",
    "rope_full_precision": True,
    "embedding_norm": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
    "scale_logits": False,
}
_STOCK_SHAPES: dict[str, dict[str, Any]] = {
    "olmo2": _STOCK_COMMON
    | {
        "norm_type": "rms",
        "norm_position": "post",
        "norm_affine": True,
        "norm_bias": False,
        "qk_norm": True,
        "qk_norm_affine": True,
        "clip_qkv": None,
    },
    "olmo": _STOCK_COMMON
    | {"norm_type": "layer", "norm_position": "pre", "norm_affine": False, "rms_norm_eps": 1e-5, "qk_norm": False},
}


@strict
class OlmoHfConfig(PreTrainedConfig):
    """Every architecture that the original OLMo trainer can express. The defaults are OLMo-2 7B.

    What is written to `config.json` is `model_type: olmo2` (or `olmo`) whenever stock `transformers` has the same
    architecture, so that a checkpoint loads anywhere; otherwise `olmo_hf` with an `auto_map` and the code files.
    """

    model_type = "olmo_hf"
    keys_to_ignore_at_inference = ["past_key_values"]
    default_theta = 500_000.0
    base_model_tp_plan = {
        # The QK-norm looks at all heads at once, so q and k are gathered before it.
        "layers.*.self_attn.q_proj": "colwise_gather_output",
        "layers.*.self_attn.k_proj": "colwise_gather_output",
        "layers.*.self_attn.v_proj": "colwise_gather_output",
        "layers.*.self_attn.o_proj": "rowwise_split_input",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 100_352
    """Rows of the embedding, padding rows included."""
    tokenizer_vocab_size: int | None = None
    """Ids that mean something; ids from here up to `vocab_size` are padding rows and are never generated."""
    hidden_size: int = 4096
    """Width of the residual stream."""
    intermediate_size: int = 11_008
    """Inputs of `down_proj` (half of the original's `mlp_hidden_size` when the MLP is gated)."""
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    """None: as many as `num_attention_heads`; 1: multi-query attention."""
    max_position_embeddings: int = 4096
    """The sequence length of training."""

    hidden_act: str = "silu"
    """Activation of the MLP, a name of `transformers.activations`; the original has silu, gelu and relu."""
    mlp_gated: bool = True
    """True: `down(act(gate(x)) * up(x))`, SwiGLU with silu. False: `down(act(up(x)))`."""

    position_embedding: Literal["rope", "alibi", "learned"] = "rope"
    rope_parameters: dict | None = None
    """`{"rope_type": ..., "rope_theta": ...}`; the plain keyword `rope_theta` is understood too."""
    rope_full_precision: bool = True
    """Rotate queries and keys in fp32 whatever their dtype."""
    alibi_bias_max: float | int = 8.0
    """Head h of H (from 1) is biased by `-distance * 2**(-h * alibi_bias_max / H)`."""

    norm_type: Literal["rms", "layer", "low_precision_layer"] = "rms"
    """`low_precision_layer` runs LayerNorm in the autocast dtype instead of fp32."""
    norm_position: Literal["post", "pre"] = "post"
    """`post` (OLMo-2): the output of each branch is normalised. `pre`: its input."""
    norm_affine: bool = True
    norm_bias: bool = False
    """Affine norms have a bias (QK norms too)."""
    rms_norm_eps: float = 1e-6
    """Epsilon of every norm, LayerNorm included."""
    qk_norm: bool = True
    """Normalise all queries, and all keys, of a position as one vector before the head split."""
    qk_norm_affine: bool = True
    embedding_norm: bool = False
    clip_qkv: float | int | None = None
    """Clamp queries, keys and values to [-clip_qkv, clip_qkv], before the QK-norm."""

    attention_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    attention_dropout: float | int = 0.0
    residual_dropout: float | int = 0.0
    embedding_dropout: float | int = 0.0
    scale_logits: bool = False
    """Multiply the logits by `hidden_size ** -0.5`."""
    tie_word_embeddings: bool = False

    reset_document_positions: bool = False
    """With `doc_lens`: restart positions at 0 in every document. The original keeps counting."""

    init_method: Literal["normal", "mitchell", "full_megatron", "kaiming_normal", "fan_in"] = "normal"
    initializer_range: float = 0.02
    """Standard deviation for `normal` and `full_megatron`."""
    init_cutoff_factor: float | int | None = None
    """Truncate draws at this many standard deviations. None: 3 for mitchell and full_megatron, no bound otherwise."""
    embedding_initializer_range: float | None = None
    """Standard deviation of the token embedding; None: the rule of `init_method`."""
    scale_embedding_init: bool = False
    """full_megatron only: the embedding's standard deviation is `initializer_range * sqrt(hidden_size)`."""

    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("model_type", None)
        given_head_dim = kwargs.pop("head_dim", None)
        if given_head_dim is not None and given_head_dim * self.num_attention_heads != self.hidden_size:
            raise ValueError(f"head_dim {given_head_dim}: only hidden_size / num_attention_heads is supported")
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        super().__post_init__(**kwargs)

    def validate_architecture(self) -> None:
        """Refuse impossible combinations, all of them at once."""
        problems = list(self._problems())
        if problems:
            raise ValueError("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        least = {"vocab_size": 1, "hidden_size": 1, "intermediate_size": 1, "num_attention_heads": 1}
        least |= {"num_hidden_layers": 0, "max_position_embeddings": 1}
        too_small = [
            f"{k} must be at least {v}, found {getattr(self, k)}" for k, v in least.items() if getattr(self, k) < v
        ]
        yield from too_small
        if not too_small:
            yield from self._contradictions()
        yield from self._out_of_range()
        if self.clip_qkv is not None and not self.clip_qkv > 0:
            yield f"clip_qkv must be above 0 or null, found {self.clip_qkv}"
        if self.hidden_act not in ACT2FN:
            yield f"hidden_act {self.hidden_act} is unknown to transformers; the original has silu, gelu and relu"
        rope: dict[str, Any] = self.rope_parameters if self.rope_parameters else {}
        if rope.get("rope_type", "default") not in _ROPE_TYPES:
            # dynamic and longrope depend on the length of the input: there is no one table.
            yield f"rope_type must be one of {', '.join(_ROPE_TYPES)}, found {rope['rope_type']}"
        theta = rope.get("rope_theta", self.default_theta)
        if not isinstance(theta, int | float) or not 0 < theta < math.inf:
            yield f"rope_theta must be a number above 0, found {theta!r}"

    def _out_of_range(self) -> Iterator[str]:
        most = {"attention_dropout": 1, "residual_dropout": 1, "embedding_dropout": 1, "num_hidden_layers": 1_000}
        for name, limit in most.items():
            if not 0 <= getattr(self, name) <= limit:
                yield f"{name} must lie between 0 and {limit:,}, found {getattr(self, name)}"
        for name in ("rms_norm_eps", "initializer_range", "embedding_initializer_range"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                yield f"{name} must not be below 0, found {value}"
        # Far tighter bounds would have the initial weights redrawn for ever.
        if self.init_cutoff_factor is not None and not self.init_cutoff_factor >= 0.01:
            yield f"init_cutoff_factor must be at least 0.01 or null, found {self.init_cutoff_factor}"

    def _contradictions(self) -> Iterator[str]:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % heads:
            yield f"hidden_size {self.hidden_size} must be a multiple of num_attention_heads {heads}"
        elif self.position_embedding == "rope" and (self.hidden_size // heads) % 2:
            yield f"rope needs an even head size, found {self.head_dim}: change num_attention_heads {heads}"
        if kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
            yield f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
        real = self.tokenizer_vocab_size
        if real is not None and not 1 <= real <= self.vocab_size:
            yield f"tokenizer_vocab_size must lie between 1 and vocab_size {self.vocab_size}, found {real}"
        if self.tie_word_embeddings and self.lm_head_bias:
            yield "lm_head_bias needs tie_word_embeddings false: a tied head has no bias"

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_width(self) -> int:
        """Outputs of the key projection, and of the value projection."""
        heads = self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads
        return heads * self.head_dim

    # ---------------------------------------------------------------- initial weights
    @property
    def init_cutoff(self) -> float | None:
        """Bound of initial draws in standard deviations, None for no bound."""
        if self.init_cutoff_factor is None and self.init_method in ("mitchell", "full_megatron"):
            return 3.0
        return self.init_cutoff_factor

    def initial_std(self, module_name: str, in_features: int) -> float:
        """Standard deviation of the initial weight of a Linear or Embedding (the parent's, before truncation).

        Args:
            module_name: for example `model.layers.3.self_attn.o_proj`; the depth is read from it.
            in_features: inputs of the Linear (for an Embedding, its width).
        """
        width, base = self.hidden_size, self.initializer_range
        layer = re.search(r"layers\.(\d+)\.", module_name)
        is_residual = module_name.endswith(("o_proj", "down_proj"))
        if module_name.endswith("embed_tokens") and self.embedding_initializer_range is not None:
            return self.embedding_initializer_range
        if self.init_method == "kaiming_normal":
            return math.sqrt(2 / in_features)
        if self.init_method == "fan_in":
            return 1 / math.sqrt(in_features)
        if self.init_method == "mitchell":
            if layer and is_residual:
                return 1 / math.sqrt(2 * in_features * (int(layer[1]) + 1))
            return 1 / math.sqrt(width)
        if self.init_method == "full_megatron":
            if module_name.endswith("embed_tokens") and self.scale_embedding_init:
                return base * math.sqrt(width)
            if module_name.endswith("lm_head"):
                return 1 / math.sqrt(width)
            if is_residual:
                return base / math.sqrt(2 * self.num_hidden_layers)
        return base

    # ---------------------------------------------------------------- reading and writing
    @property
    def stock_model_type(self) -> str | None:
        """`olmo2` or `olmo` when stock transformers has this very architecture, else None."""
        for model_type, shape in _STOCK_SHAPES.items():
            # In fp32 the low-precision LayerNorm is the plain one; stock `olmo` always runs it in fp32.
            ours = {name: getattr(self, name) for name in shape}
            if ours["norm_type"] == "low_precision_layer":
                ours["norm_type"] = "layer"
            if ours == shape:
                return model_type
        return None

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json: identical to the parent's, but named after the stock architecture if any."""
        out = super().to_dict()
        # Releases of transformers before 5, and most other tools, look for the theta at the top level and silently
        # assume 10000 when it is not there.
        out["rope_theta"] = self.rope_parameters["rope_theta"]  # type: ignore[index]
        stock = self.stock_model_type
        if stock is None:
            out["auto_map"] = {
                "AutoConfig": "configuration_olmo.OlmoHfConfig",
                "AutoModel": "modeling_olmo.OlmoHfModel",
                "AutoModelForCausalLM": "modeling_olmo.OlmoHfForCausalLM",
            }
            return out
        out.pop("auto_map", None)
        out["model_type"] = stock
        if out.get("architectures"):
            prefix = {"olmo2": "Olmo2", "olmo": "Olmo"}[stock]
            out["architectures"] = [name.replace("OlmoHf", prefix) for name in out["architectures"]]
        known = {field.name for field in dataclasses.fields(_STOCK_CONFIGS[stock])}
        implied = {field.name: field.default for field in dataclasses.fields(OlmoHfConfig)} | _STOCK_SHAPES[stock]
        return {k: v for k, v in out.items() if k in known or k not in implied or v != implied[k]}

    def to_init_dict(self) -> dict[str, Any]:
        """Keyword arguments that make an equal configuration."""
        base_names = {field.name for field in dataclasses.fields(PreTrainedConfig)}
        names = [field.name for field in dataclasses.fields(OlmoHfConfig) if field.name not in base_names]
        return {name: copy.deepcopy(getattr(self, name)) for name in names}

    @classmethod
    def from_stock_dict(cls, config_dict: dict[str, Any]) -> dict[str, Any]:
        """The settings of a stock `olmo2` or `olmo` config.json in our fields; others are returned as they are."""
        stock = config_dict.get("model_type", cls.model_type)
        if stock not in _STOCK_CONFIGS:
            if stock != OlmoHfConfig.model_type:
                raise ValueError(f"model_type {stock} is no OLMo architecture; expected olmo_hf, olmo2 or olmo")
            return config_dict
        # Keys that the file leaves out mean what they mean to stock transformers.
        base_names = {field.name for field in dataclasses.fields(PreTrainedConfig)}
        fields = [field for field in dataclasses.fields(_STOCK_CONFIGS[stock]) if field.name not in base_names]
        defaults = {field.name: field.default for field in fields} | {
            "rope_theta": _STOCK_CONFIGS[stock].default_theta
        }
        return defaults | _STOCK_SHAPES[stock] | config_dict | {"model_type": cls.model_type}

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> tuple[dict[str, Any], dict]:
        """Identical to the parent's, but stock `olmo2` and `olmo` files are understood, and one must be there."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        if "model_type" not in config_dict:  # the parent goes on with its defaults
            raise ValueError(f"{pretrained_model_name_or_path}: no config.json, or one without a model_type")
        return cls.from_stock_dict(config_dict), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Identical to the parent's, but stock `olmo2` and `olmo` dictionaries are understood."""
        return super().from_dict(cls.from_stock_dict(config_dict), **kwargs)

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Identical to the parent's, but the code goes along where stock transformers lacks the architecture."""
        if self.stock_model_type is None:
            copy_code(Path(__file__).parent, Path(save_directory))
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)


def copy_code(source: Path, target: Path) -> None:
    """Copy those of the self-contained code files that `source` has (a remote-code cache splits them up)."""
    target.mkdir(parents=True, exist_ok=True)
    for name in CODE_FILES:
        if (source / name).is_file() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
