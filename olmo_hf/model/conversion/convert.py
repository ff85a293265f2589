"""One checkpoint in, another out: original OLMo trainer, Hugging Face, and sharded checkpoints of our own runs."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from olmo_hf.errors import ConversionError
from olmo_hf.model.args import ModelArgs
from olmo_hf.model.build import load_tokenizer
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.conversion.architecture import config_from_original, config_to_original
from olmo_hf.model.conversion.lazy import LazyTable, from_safetensors, write_model_files, write_safetensors
from olmo_hf.model.conversion.original import kind_of, open_original, read_config
from olmo_hf.model.conversion.original_writing import (
    OriginalContent,
    original_groups,
    refuse_foreign_state,
    write_original,
)
from olmo_hf.model.conversion.sharded import from_distributed_checkpoint
from olmo_hf.model.conversion.streamed import streamed_logits
from olmo_hf.model.conversion.tensor_names import tensor_table
from olmo_hf.model.conversion.translate import (
    cast,
    optimizer_to_original,
    optimizer_to_ours,
    trim_vocabulary,
    weights_to_original,
    weights_to_ours,
)
from olmo_hf.model.modeling_olmo import OlmoHfForCausalLM

# How a checkpoint of our runs is laid out (written by olmo_hf.training.tensors, which this room may not import).
OPTIMIZER_FILE, OPTIMIZER_PREFIX = "optimizer.safetensors", "optimizer."
OPTIMIZER_DESCRIPTION, SHARDED_DIR, RUN_STATE = "optimizer.json", "sharded", "run_state.json"
WEIGHTS_FILE, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Any checkpoint, in our words; tensors are read on demand."""

    kind: str
    config: OlmoHfConfig
    weights: LazyTable
    optimizer: LazyTable = field(default_factory=dict)
    """`{parameter}.{state key}`."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    """The optimizer's parameter groups with `param_names`, where the checkpoint tells them."""
    counters: dict[str, int] = field(default_factory=dict)
    """Where the run stood, in the original's words."""
    notices: list[str] = field(default_factory=list)
    """What could not come along, for the user to read."""


def open_checkpoint(source: Path) -> Checkpoint:
    """Open a checkpoint of the original trainer, of Hugging Face, or of a run of ours.

    Raises:
        ConversionError: none of these, damaged, or of an architecture that cannot be said here.
    """
    openers: dict[Callable[[Path], Checkpoint], bool] = {
        _open_original: kind_of(source) is not None,
        _open_sharded_run: (source / SHARDED_DIR / ".metadata").is_file(),
        _open_huggingface: (source / "config.json").is_file(),
    }
    for opener, is_one in openers.items():
        if not is_one:
            continue
        try:
            return opener(source)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError, OSError, StrictDataclassError) as error:
            # A file of another program may hold anything; those that tell what is wrong raise ConversionError.
            reason = " ".join(str(error).split())
            raise ConversionError(
                f"{source}: not what its files promise ({type(error).__name__}: {reason}); choose a whole checkpoint"
            ) from error
    raise ConversionError(
        f"{source}: no checkpoint; expected the original trainer's config.yaml with its weights, a Hugging Face "
        f"config.json, or a run's {SHARDED_DIR}/ directory"
    )


def _open_original(source: Path) -> Checkpoint:
    original = open_original(source)
    config, layout = config_from_original(original.config["model"])
    entries = tensor_table(config, layout)
    optimizer, notices = optimizer_to_ours(original.optimizer, entries)
    return Checkpoint(
        kind=f"original ({original.kind})",
        config=config,
        weights=weights_to_ours(original.weights, entries),
        optimizer=optimizer,
        counters=original.counters,
        notices=notices,
    )


def _open_huggingface(source: Path) -> Checkpoint:
    config = OlmoHfConfig.from_pretrained(source)
    optimizer: LazyTable = {}
    if (source / OPTIMIZER_FILE).is_file():
        optimizer = _without_prefix(OPTIMIZER_PREFIX, from_safetensors([source / OPTIMIZER_FILE]))
    return Checkpoint(
        kind="Hugging Face",
        config=config,
        weights=from_safetensors(_weight_files(source)),
        optimizer=optimizer,
        groups=_groups_of_run(source),
        counters=_counters_of_run(source),
    )


def _weight_files(source: Path) -> list[Path]:
    """The files that transformers would read, and no other that happens to lie there."""
    if (source / WEIGHTS_FILE).is_file():
        return [source / WEIGHTS_FILE]
    if not (source / WEIGHTS_INDEX).is_file():
        raise ConversionError(
            f"{source}: holds neither {WEIGHTS_FILE} nor {WEIGHTS_INDEX}; save the weights as safetensors, others "
            "are not read"
        )
    (weight_map,) = _stored(source / WEIGHTS_INDEX, "weight_map")
    names = set(weight_map.values())
    paths = [source / name for name in sorted(names) if Path(name).name == name]
    absent = sorted(names - {path.name for path in paths if path.is_file()})
    if absent:
        raise ConversionError(
            f"{source}: {WEIGHTS_INDEX} names files that are not there ({', '.join(absent[:5])}); copy them too"
        )
    return paths


def _counters_of_run(source: Path) -> dict[str, int]:
    """Where a run of ours stood, if this is one of its checkpoints."""
    if not (source / RUN_STATE).is_file():
        return {}
    position, step, tokens = _stored(source / RUN_STATE, "position", "step", "tokens")
    return {
        "epoch": position["epoch"],
        "global_step": step,
        "global_train_examples_seen_this_epoch": position["instances"],
        "global_train_tokens_seen": tokens,
    }


def _groups_of_run(source: Path) -> list[dict[str, Any]]:
    if not (source / OPTIMIZER_DESCRIPTION).is_file():
        return []
    (groups,) = _stored(source / OPTIMIZER_DESCRIPTION, "groups")
    return list(groups)


def _stored(path: Path, *keys: str) -> list[Any]:
    """What a JSON file holds under these keys."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [content[key] for key in keys]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConversionError(f"{path}: does not say its {', '.join(keys)} ({reason}); choose a whole one") from error


def _open_sharded_run(source: Path) -> Checkpoint:
    table = from_distributed_checkpoint(source / SHARDED_DIR)
    try:
        identity = json.loads((source / RUN_STATE).read_text(encoding="utf-8"))["identity"]
        config = OlmoHfConfig.from_dict(dict(identity["model"]))
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ConversionError(f"{source / RUN_STATE}: does not say which architecture the shards are of") from error
    is_whole = (source / WEIGHTS_FILE).is_file() or (source / WEIGHTS_INDEX).is_file()  # only moments are in shards
    return Checkpoint(
        kind="sharded run",
        config=config,
        weights=from_safetensors(_weight_files(source)) if is_whole else _without_prefix("model.", table),
        optimizer=_without_prefix(OPTIMIZER_PREFIX, table),
        groups=_groups_of_run(source),
        counters=_counters_of_run(source),
    )


def _without_prefix(prefix: str, table: LazyTable) -> LazyTable:
    return {name.removeprefix(prefix): tensor for name, tensor in table.items() if name.startswith(prefix)}


def prepare(checkpoint: Checkpoint, *, trim: bool, dtype: torch.dtype | None, keep_optimizer: bool) -> Checkpoint:
    """The changes a user may ask for on the way: no padding rows, another weight type, no optimizer state."""
    if trim:
        weights, config = trim_vocabulary(checkpoint.weights, checkpoint.config)
        optimizer, _ = trim_vocabulary(checkpoint.optimizer, checkpoint.config)
        checkpoint = replace(checkpoint, weights=weights, optimizer=optimizer, config=config)
    if dtype is not None:
        checkpoint = replace(checkpoint, weights=cast(checkpoint.weights, dtype))
    return checkpoint if keep_optimizer else replace(checkpoint, optimizer={})


def write_huggingface(checkpoint: Checkpoint, target: Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
    """Write configuration, weights and, if there is any, optimizer state into an existing directory.

    Raises:
        ConversionError: the weights are not those of the configuration.
    """
    config = OlmoHfConfig(**checkpoint.config.to_init_dict())
    with torch.device("meta"):
        model = OlmoHfForCausalLM(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: tensor.shape for name, tensor in checkpoint.weights.items() if name != _tied_head(config)}
    if found != expected:
        wrong = sorted(name for name in expected | found if found.get(name) != expected.get(name))
        raise ConversionError(
            f"{len(wrong)} weights are missing, left over or of another shape than the configuration says "
            f"({', '.join(wrong[:5])}); choose a whole checkpoint, with the configuration of its weights"
        )
    model.config.architectures = [type(model).__name__]
    model.config.dtype = next(iter(checkpoint.weights.values())).dtype
    model.config.save_pretrained(target)
    model.generation_config.save_pretrained(target)
    write_model_files(target, {name: checkpoint.weights[name] for name in expected}, max_shard_bytes)
    if checkpoint.optimizer:
        write_safetensors(target / OPTIMIZER_FILE, checkpoint.optimizer, lambda name: OPTIMIZER_PREFIX + name)


def write_to_original(checkpoint: Checkpoint, target: Path, *, file_format: Literal["pt", "safetensors"]) -> list[str]:
    """Write an unsharded checkpoint of the original trainer into an existing directory.

    Returns:
        Notices for the user.

    Raises:
        ConversionError: the original has no word for the architecture or for the optimizer's state.
    """
    refuse_foreign_state(checkpoint.optimizer)
    model_config = config_to_original(checkpoint.config)
    entries = tensor_table(checkpoint.config)
    weights = {name: tensor for name, tensor in checkpoint.weights.items() if name != _tied_head(checkpoint.config)}
    content = OriginalContent(
        model_config=model_config,
        weights=weights_to_original(weights, entries),
        optimizer=optimizer_to_original(checkpoint.optimizer, entries),
        groups=original_groups(checkpoint.groups, entries) if checkpoint.optimizer else [],
        counters=checkpoint.counters,
    )
    write_original(target, content, file_format)
    notices = []
    if not checkpoint.counters:
        notices.append("there is no train.pt, the source has no counters: start the original with reset_trainer_state")
    if checkpoint.optimizer and not checkpoint.groups:
        notices.append(
            f"the source has no {OPTIMIZER_DESCRIPTION}: optim holds the groups, betas and eps of the OLMo-2 recipe"
        )
    return notices


def _tied_head(config: OlmoHfConfig) -> str | None:
    """Some files store a tied head beside the embedding it is tied to."""
    return "lm_head.weight" if config.tie_word_embeddings else None


def largest_logit_difference(before: Checkpoint, after: Checkpoint, *, seed: int = 0) -> float:
    """Largest |difference| of the logits of two checkpoints on random ids, over the ids both have rows for.

    Raises:
        ConversionError: the logits of the first are not finite.
    """
    vocab_size = min(before.config.vocab_size, after.config.vocab_size)
    length = min(64, before.config.max_position_embeddings)
    ids = torch.randint(0, vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))
    logits = [streamed_logits(c.config, c.weights, ids)[..., :vocab_size] for c in (before, after)]
    if not torch.isfinite(logits[0]).all():
        raise ConversionError(
            "the logits of the source itself are not numbers: its weights hold NaN or infinity, or are too large for "
            "the type asked for; choose another checkpoint or --dtype, or give --no-verify to convert it as it is"
        )
    return (logits[0] - logits[1]).abs().max().item()


def carry_tokenizer(source: Path, given: str | None, config: OlmoHfConfig, target: Path) -> list[str]:
    """Save the tokenizer beside the weights: the one given, else the source's own.

    Returns:
        Notices: none found, or special ids that disagree with the configuration.

    Raises:
        ConfigError: the tokenizer given cannot be loaded.
    """
    if given is None:
        given = _tokenizer_of(source)
    if given is None:
        return ["no tokenizer comes along; give one with --tokenizer"]
    tokenizer = load_tokenizer(ModelArgs(tokenizer=given), model_max_length=config.max_position_embeddings)
    assert tokenizer is not None
    _name_special_tokens(tokenizer, config)
    tokenizer.save_pretrained(target)
    return [
        f"{name} is {getattr(config, name)} in the configuration and {getattr(tokenizer, name)} in the tokenizer"
        for name in ("eos_token_id", "pad_token_id")
        if getattr(config, name) != getattr(tokenizer, name)
    ]


def _tokenizer_of(source: Path) -> str | None:
    if (source / "tokenizer_config.json").is_file():
        return str(source)
    if (source / "tokenizer.json").is_file():
        return str(source / "tokenizer.json")
    if kind_of(source) is not None:
        identifier: Any = open_original_tokenizer(source)
        if isinstance(identifier, str) and Path(identifier).is_file():
            return identifier
    return None


def open_original_tokenizer(source: Path) -> Any:
    """`tokenizer.identifier` of an original `config.yaml`, or None."""
    section = read_config(source / "config.yaml").get("tokenizer")
    return section.get("identifier") if isinstance(section, dict) else None


def _name_special_tokens(tokenizer: PreTrainedTokenizerBase, config: OlmoHfConfig) -> None:
    """A bare tokenizer.json names no end of text; the configuration's ids do."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return
    setters: dict[str, Callable[[str], None]] = {
        "eos_token": lambda token: setattr(tokenizer, "eos_token", token),
        "pad_token": lambda token: setattr(tokenizer, "pad_token", token),
    }
    for name, set_token in setters.items():
        number = getattr(config, f"{name}_id")
        if getattr(tokenizer, name) is None and isinstance(number, int) and number < len(tokenizer):
            set_token(str(tokenizer.convert_ids_to_tokens(number)))
