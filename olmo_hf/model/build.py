"""From the `model` section of a run to a model and its tokenizer."""

import contextlib
import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import is_flash_attn_2_available

from olmo_hf.errors import CheckpointError, ConfigError, last_line
from olmo_hf.model.activation_checkpointing import apply_activation_checkpointing
from olmo_hf.model.args import ModelArgs
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.init import initialize_weights
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM
from olmo_hf.model.presets import FOLLOWS_THE_TOKENIZER, preset_fields
from olmo_hf.model.weights import check_weights, require_no_differences

# Embeddings with a multiple of this many rows run faster on GPUs.
VOCAB_MULTIPLE = 128

_FORWARDED_NAMES = {"rope_theta"}  # understood by OlmoHfConfig though it is no field


def build_model(
    args: ModelArgs,
    *,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_position_embeddings: int | None = None,
    device: str = "cpu",
    half_precision: bool = False,
) -> OlmoHfForCausalLM:
    """The model of a run in fp32, with fresh or loaded weights.

    Args:
        args: the `model` section.
        seed: of the initial weights; equal seeds give bitwise equal weights for every number of ranks.
        tokenizer: gives vocabulary size and special ids where the section leaves them open, and is checked otherwise.
        max_position_embeddings: the sequence length of the run's data.
        device: where the parameters live. `meta` makes a model without memory: give it some with `to_empty` after
            sharding, then call `weights.fill_weights` with the same section and seed.
        half_precision: the run computes in bf16 or fp16; flash attention can do nothing else.

    Raises:
        ConfigError: settings that do not fit together, all problems at once.
        CheckpointError: `init_from` lacks weights of this model or holds others.
    """
    config = build_config(args, tokenizer=tokenizer, max_position_embeddings=max_position_embeddings)
    config._attn_implementation = choose_attn_implementation(
        args.attn_implementation, config, half_precision=half_precision
    )
    try:
        if device == "meta":
            model = _without_memory(args.init_from, config)
        else:
            model = _load(args.init_from, config) if args.init_from is not None else _create(config, seed, device)
    except (ImportError, ValueError) as error:
        if "attention" not in str(error).lower() and "flash" not in str(error).lower():
            raise
        raise ConfigError(
            f"model.attn_implementation: found {args.attn_implementation!r}, which cannot be used here ({error}); "
            "choose another, or leave it out"
        ) from error
    if args.activation_checkpointing is not None:
        apply_activation_checkpointing(model, args.activation_checkpointing)
    return model


def build_config(
    args: ModelArgs,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_position_embeddings: int | None = None,
) -> OlmoHfConfig:
    """The architecture that the `model` section asks for, completed and checked against tokenizer and data.

    Raises:
        ConfigError: all problems at once.
    """
    problems = _source_problems(args) + _unknown_keys(args.config)
    if problems:
        raise ConfigError(problems)
    fields = _base_fields(args) | args.config
    if args.config.keys() & {"rope_theta"} and "rope_parameters" not in args.config:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": float(fields.pop("rope_theta"))}
    if max_position_embeddings is not None:
        problems += _fit_sequence_length(fields, args, max_position_embeddings)
    if tokenizer is not None:
        if args.preset in FOLLOWS_THE_TOKENIZER and "vocab_size" not in args.config:
            del fields["vocab_size"]
        problems += _fit_tokenizer(fields, args.config, tokenizer)
    try:
        config = OlmoHfConfig(**fields)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise ConfigError([*problems, f"model.config: {last_line(error)}"]) from error
    problems += _special_ids_outside(config)
    if problems:
        raise ConfigError(problems)
    return config


def _special_ids_outside(config: OlmoHfConfig) -> list[str]:
    problems = []
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        ids = getattr(config, name, None)
        for one in ids if isinstance(ids, list) else [ids]:
            if one is not None and not 0 <= one < config.vocab_size:
                problems.append(
                    f"model.config.{name}: found {one}, expected an id of the vocabulary (0 to "
                    f"{config.vocab_size - 1:,}); correct it, or leave it out"
                )
    return problems


def load_tokenizer(args: ModelArgs, *, model_max_length: int | None = None) -> PreTrainedTokenizerBase | None:
    """The tokenizer that goes into every checkpoint, or None.

    Args:
        args: `tokenizer` is a directory, a `tokenizer.json` file or a hub id; unset, a directory in `init_from` is
            asked for its own.
        model_max_length: the sequence length of the run; other tools cut prompts by what the tokenizer says.

    Raises:
        ConfigError: there is no tokenizer where the section says.
    """
    source = args.tokenizer
    if source is None:
        if args.init_from is None or not Path(args.init_from, "tokenizer_config.json").is_file():
            return None
        source = args.init_from
    limit = {} if model_max_length is None else {"model_max_length": model_max_length}
    try:
        if source.endswith(".json"):
            return PreTrainedTokenizerFast(tokenizer_file=source, **limit)
        return AutoTokenizer.from_pretrained(source, **limit)
    except Exception as error:  # the tokenizers library raises bare Exception for a bad file
        raise ConfigError(
            f"model.tokenizer: found {source!r}, expected a directory with tokenizer files, a tokenizer.json or a hub "
            f"id that can be reached: {last_line(error)}"
        ) from error


def vocabulary_of(config: OlmoHfConfig) -> dict[str, Any]:
    """`vocab_size`, `eos_token_id` and `pad_token_id` of a model, for whoever opens its data."""

    def one(value: int | list[int] | None) -> int | None:
        return value[0] if isinstance(value, list) else value

    return {
        "vocab_size": config.vocab_size,
        "eos_token_id": one(getattr(config, "eos_token_id", None)),
        "pad_token_id": one(getattr(config, "pad_token_id", None)),
    }


def choose_attn_implementation(wish: str, config: OlmoHfConfig, *, half_precision: bool = False) -> str:
    """`auto` becomes flash attention where it can run, else sdpa.

    Raises:
        ConfigError: the backend exists but cannot train this model here; whether it is installed is for transformers
            to say.
    """
    if wish.startswith("flash") and config.position_embedding == "alibi":
        raise ConfigError(
            f"model.attn_implementation: found {wish!r}, which takes no position bias, and the model has ALiBi; "
            "choose sdpa, eager or flex_attention"
        )
    if wish == "flex_attention" and not torch.accelerator.is_available():
        raise ConfigError(
            "model.attn_implementation: found 'flex_attention', which has no backward pass on CPUs; choose sdpa"
        )
    if wish != "auto":
        return wish
    fits = half_precision and config.position_embedding != "alibi"
    return "flash_attention_2" if fits and torch.cuda.is_available() and is_flash_attn_2_available() else "sdpa"


def _skeleton(config: OlmoHfConfig) -> OlmoHfForCausalLM:
    with torch.device("meta"):
        return OlmoHfForCausalLM(config)


def _without_memory(init_from: str | None, config: OlmoHfConfig) -> OlmoHfForCausalLM:
    model = _skeleton(config)
    if init_from is not None:
        check_weights(model, init_from)
        with contextlib.suppress(OSError):  # there need not be one
            model.generation_config = GenerationConfig.from_pretrained(init_from)
    return model


def _create(config: OlmoHfConfig, seed: int, device: str) -> OlmoHfForCausalLM:
    model = _skeleton(config)  # without memory, so that no weight is drawn twice
    model.to_empty(device=device)
    initialize_weights(model, seed)
    return model


def _load(init_from: str | None, config: OlmoHfConfig) -> OlmoHfForCausalLM:
    try:
        loaded: Any = OlmoHfForCausalLM.from_pretrained(
            init_from,
            config=config,
            dtype=torch.float32,  # updates smaller than a bf16 step would vanish without fp32 master weights
            attn_implementation=config._attn_implementation,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with the rest
        )
    # An index file may hold anything.
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"model.init_from: the weights in {init_from} cannot be read: {last_line(error)}; choose a whole one"
        ) from error
    model, info = loaded
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    require_no_differences(str(init_from), {kind.replace("_", " "): sorted(map(str, info[kind])) for kind in kinds})
    broken = [name for name, parameter in model.named_parameters() if not bool(torch.isfinite(parameter).all())]
    if broken:
        raise CheckpointError(
            f"model.init_from: {len(broken)} weights in {init_from} hold NaN or infinity ({', '.join(broken[:5])}); "
            "choose a checkpoint from before that happened"
        )
    return model


def _source_problems(args: ModelArgs) -> list[str]:
    if args.preset is not None and args.init_from is not None:
        return [f"model: found preset {args.preset!r} and init_from {args.init_from!r}, expected one of the two"]
    if args.preset is None and args.init_from is None and not args.config:
        return ["model: nothing says what to build; set model.preset, model.config or model.init_from"]
    return []


def _unknown_keys(config: dict[str, Any]) -> list[str]:
    general = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    names = ({field.name for field in dataclasses.fields(OlmoHfConfig)} - general) | _FORWARDED_NAMES
    problems = []
    for key in sorted(config.keys() - names):
        close = difflib.get_close_matches(key, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(sorted(names))}"
        problems.append(f"model.config.{key}: no such field of OlmoHfConfig; {hint}")
    return problems


def _base_fields(args: ModelArgs) -> dict[str, Any]:
    if args.preset is not None:
        return preset_fields(args.preset)
    if args.init_from is None:
        return {}
    try:
        return OlmoHfConfig.from_pretrained(args.init_from).to_init_dict()
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ConfigError(
            f"model.init_from: found {args.init_from!r}, expected a checkpoint directory or a hub id: "
            f"{last_line(error)}"
        ) from error


def _fit_sequence_length(fields: dict[str, Any], args: ModelArgs, length: int) -> list[str]:
    explicit = args.config.get("max_position_embeddings")
    if explicit is not None:
        if explicit < length:
            return [
                f"model.config.max_position_embeddings: found {explicit}, but data.sequence_length is {length}; raise "
                "the first, lower the second, or leave the first out"
            ]
        return []
    loaded = fields.get("max_position_embeddings", length) if args.init_from is not None else length
    if loaded < length and fields.get("position_embedding") == "learned":
        return [
            f"data.sequence_length: found {length}, but {args.init_from} has learned positions for {loaded} tokens; "
            "lower the first"
        ]
    fields["max_position_embeddings"] = max(loaded, length)
    return []


def _fit_tokenizer(fields: dict[str, Any], explicit: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Complete vocabulary size and special ids from the tokenizer; say where the two disagree."""
    problems = []
    size = len(tokenizer)
    if "vocab_size" not in fields:
        fields["vocab_size"] = -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if size > fields["vocab_size"]:
        problems.append(
            f"model.config.vocab_size: found {fields['vocab_size']}, but the tokenizer {tokenizer.name_or_path!r} has "
            f"{size} ids; raise it to at least {-(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE} or use another tokenizer"
        )
    if explicit.get("tokenizer_vocab_size", size) != size:
        problems.append(
            f"model.config.tokenizer_vocab_size: found {explicit['tokenizer_vocab_size']}, but the tokenizer "
            f"{tokenizer.name_or_path!r} has {size} ids; leave it out"
        )
    fields["tokenizer_vocab_size"] = min(size, fields["vocab_size"])
    for name in ("eos_token_id", "pad_token_id"):
        theirs, ours = getattr(tokenizer, name), fields.get(name)
        if theirs is None:
            continue
        if ours is not None and ours != theirs:
            meaning = tokenizer.convert_ids_to_tokens(ours) if ours < size else None
            problems.append(
                f"model.config.{name}: found {ours} (token {meaning!r} of the tokenizer), but the tokenizer "
                f"{tokenizer.name_or_path!r} says {theirs} ({tokenizer.convert_ids_to_tokens(theirs)!r}); set "
                f"model.config.{name} to {theirs} or use the tokenizer that belongs to the model"
            )
        fields[name] = theirs
    return problems
