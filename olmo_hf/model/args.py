"""What may be asked of the model: the `model` section of a run's YAML."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Exactly one of `preset`, `config` or `init_from` says what is built; `config` may refine a preset."""

    preset: str | None = None
    """A named size from `olmo_hf/model/presets.py`, for example `olmo2_7b`."""

    config: dict[str, Any] = field(default_factory=dict)
    """Fields of `OlmoHfConfig`: the whole architecture, or changes to `preset`."""

    init_from: str | None = None
    """A checkpoint directory or hub id whose weights start this run (continued pre-training)."""

    tokenizer: str | None = None
    """Directory, `tokenizer.json` file or hub id of the tokenizer; saved beside every checkpoint. None: the one in the
    `init_from` directory, if it has one."""

    attn_implementation: Literal[
        "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = "auto"
    """`auto`: flash attention on a GPU where the package is installed and the run is in bf16 or fp16, else sdpa. All
    others are taken or refused."""

    activation_checkpointing: str | None = None
    """`whole_layer`, `one_in_two`, `one_in_three`, `one_in_four`, `one_in_eight`, `two_in_three`, `three_in_four`,
    `fine_grained`; None keeps all activations."""
