"""Which parameters decay, and which learn at another rate than the rest."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn

from olmo_hf.errors import ConfigError
from olmo_hf.wording import counted

WeightDecayRule = Literal["by_role", "by_dimension"]

_WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def parameter_name(name: str) -> str:
    """A parameter's name without what DDP, FSDP, torch.compile and activation checkpointing put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def decays(
    name: str,
    parameter: torch.Tensor,
    *,
    is_embedding: bool,
    decay_norm_and_bias: bool,
    decay_embeddings: bool,
    rule: WeightDecayRule,
) -> bool:
    """Whether a parameter decays.

    `by_role`, the original's four rules (spec: trainer.md section 12): matrices do, an untied head included; norms and
    biases by `decay_norm_and_bias`; embeddings, and with them a tied head, by `decay_embeddings`. `by_dimension`, the
    rule of many from-scratch trainers: whatever has two or more dimensions, whatever the flags say.
    """
    if rule == "by_dimension":
        return parameter.ndim >= 2
    if is_embedding:
        return decay_embeddings
    if parameter.ndim < 2 or name.endswith("bias"):
        return decay_norm_and_bias
    return True


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    decay_norm_and_bias: bool,
    decay_embeddings: bool,
    rule: WeightDecayRule = "by_role",
) -> list[dict[str, Any]]:
    """Splits the trainable parameters into those that decay and those that do not.

    Args:
        model: sharded or not; every trainable parameter ends up in exactly one group, a tied one once.
        weight_decay: of the first group.
        decay_norm_and_bias: whether norm weights and all biases decay (OLMo-2: yes).
        decay_embeddings: whether embeddings, token and position, decay (OLMo-2: no).
        rule: see `decays`.

    Returns:
        The group that decays, then the one that does not; an empty one is left out. Each is sorted by name and has
        `params`, `param_names` and `weight_decay`.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    named = {
        parameter_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    decaying = {
        name: decays(
            name,
            parameter,
            is_embedding=id(parameter) in embeddings,
            decay_norm_and_bias=decay_norm_and_bias,
            decay_embeddings=decay_embeddings,
            rule=rule,
        )
        for name, parameter in named.items()
    }
    groups = []
    for decay in (True, False):
        names = sorted(name for name in named if decaying[name] is decay)
        if names:
            groups.append(
                {
                    "params": [named[name] for name in names],
                    "param_names": names,
                    "weight_decay": weight_decay if decay else 0.0,
                }
            )
    return groups


def split_by_learning_rate(
    groups: list[dict[str, Any]], factors: Mapping[str, float], *, learning_rate: float
) -> list[dict[str, Any]]:
    """Splits each group into parts that learn at the same rate.

    Args:
        groups: each with `params` and `param_names`.
        factors: shell patterns of whole names, the first that fits decides; none is a factor of 1.
        learning_rate: the peak.

    Returns:
        The same groups where there are no factors; otherwise their parts, the one at the full rate first, the others
        in the order of `factors`, each with its factor as `lr_scale` and its peak as `lr`.

    Raises:
        ConfigError: a pattern fits no parameter, or decides on none because others before it fit them all.
    """
    if not factors:
        return groups
    patterns = list(factors)
    deciding = {
        name: next((i for i, pattern in enumerate(patterns) if fnmatchcase(name, pattern)), -1)
        for group in groups
        for name in group["param_names"]
    }
    idle = [pattern for i, pattern in enumerate(patterns) if i not in deciding.values()]
    if idle:
        raise ConfigError([_idle_pattern(pattern, list(deciding)) for pattern in idle])
    split = []
    for group in groups:
        for number in range(-1, len(patterns)):
            chosen = [i for i, name in enumerate(group["param_names"]) if deciding[name] == number]
            if chosen:
                scale = 1.0 if number < 0 else factors[patterns[number]]
                parts = {key: [group[key][i] for i in chosen] for key in ("params", "param_names")}
                split.append({**group, **parts, "lr_scale": scale, "lr": learning_rate * scale})
    return split


def _idle_pattern(pattern: str, names: list[str]) -> str:
    key = f"training.learning_rate_factors.{pattern}"
    if any(fnmatchcase(name, pattern) for name in names):
        return f"{key}: every parameter that it fits is decided on by a pattern above it; move it up or remove it"
    return (
        f"{key}: fits no parameter; write a whole name or a pattern of one, such as {names[-1]!r} or "
        "'*embed_tokens*' (names as in a checkpoint)"
    )


def name_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Gives the groups of an optimizer of Hugging Face's their `param_names`, where they hold the model's tensors."""
    names = {id(parameter): parameter_name(name) for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        if all(id(parameter) in names for parameter in group["params"]):
            group["param_names"] = [names[id(parameter)] for parameter in group["params"]]


def describe_groups(groups: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Rows (label, value) of the table printed at the start: what decays and what does not, by name.

    Numbered layers are folded into one entry with the number of them.
    """
    rows = []
    for number, group in enumerate(groups):
        kinds: dict[str, int] = {}
        for name in group["param_names"]:
            kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
            kinds[kind] = kinds.get(kind, 0) + 1
        entries = [kind if count == 1 else f"{kind} (x{count})" for kind, count in kinds.items()]
        elements = sum(parameter.numel() for parameter in group["params"])
        size = f"{counted(len(group['params']), 'tensor')}, {elements:,} elements"
        muon = ", muon" if group.get("use_muon", False) else ""
        scale = f", learning rate x {group['lr_scale']:g}" if group.get("lr_scale", 1.0) != 1.0 else ""
        label = f"group {number}, weight decay {group['weight_decay']}{scale}{muon}"
        rows.append((label, f"{size}: {', '.join(entries)}"))
    return rows
