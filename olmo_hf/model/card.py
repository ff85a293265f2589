"""The model card of a checkpoint: what the model is, what it read, how it was trained, how well it does."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from olmo_hf.errors import CheckpointError
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.size import count_parameters

# Settings that say what was learned and how; the rest of a run's settings is about the machine.
RECIPE = (
    "max_duration",
    "global_train_batch_size",
    "learning_rate",
    "scheduler",
    "bolt_on_warmup",
    "optimizer",
    "optim",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
    "weight_decay_rule",
    "max_grad_norm",
    "max_grad_norm_ratio",
    "clip_groups",
    "z_loss_weight",
    "loss_denominator",
    "decay_norm_and_bias",
    "decay_embeddings",
    "selective_updates",
    "seed",
    "bf16",
    "fp16",
)
MOST_PATHS = 20
ORDER = ("sequence_length", "seed", "shuffle", "order", "mix_tokens", "document_masking", "document_positions")
RUN_SETTINGS = "config.yaml"


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card is written from."""

    name: str
    config: OlmoHfConfig
    step: int | None = None
    tokens: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The run's resolved `config.yaml`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Last value of every metric at this checkpoint."""
    versions: Mapping[str, str] = field(default_factory=dict)
    license: str | None = None
    """An identifier that the Hub knows, for example `apache-2.0`."""


def write_card(facts: CardFacts) -> str:
    """Markdown with the front matter that the Hub reads."""
    parts = [
        _front_matter(facts),
        f"# {facts.name}",
        "A causal language model pretrained with olmo_hf.",
        _usage(facts),
        "## Model\n\n" + _table(_architecture(facts)),
        "## Training data\n\n" + training_data(facts.settings.get("data")),
        "## Recipe\n\n" + recipe(facts.settings.get("training")),
        "## Metrics\n\n" + (_table(_metrics(facts.metrics)) if facts.metrics else "None were recorded."),
        "## Lineage\n\n" + _table(_lineage(facts)),
        "## License\n\n" + ("Not stated." if facts.license is None else facts.license),
    ]
    return "\n\n".join(parts) + "\n"


def run_settings(checkpoint: Path) -> dict[str, Any]:
    """The resolved settings of the run that a checkpoint belongs to; empty where none lie beside it.

    Raises:
        CheckpointError: the file of settings is damaged.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    file = checkpoint.resolve().parent / RUN_SETTINGS
    if not file.is_file():
        return {}
    try:
        settings: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        raise CheckpointError(
            f"{file}: found no readable settings ({error}), expected those of the run; mend it or move it away"
        ) from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file}: found a list, expected the sections of a run; mend it or move it away")
    return settings


def public_path(path: str) -> str:
    """A data path without what gives access to it: user names, passwords and signed queries of addresses."""
    return re.sub(r"(?<=://)[^/@]*@", "", path.split("?", 1)[0])


def training_data(section: Any) -> str:
    """The files that the `data` section of a run names, and what decides their order."""
    if not isinstance(section, Mapping):
        return "Not recorded."
    lines = [] if section.get("mix") is None else [f"- mix `{section['mix']}`"]
    lines += _paths(section.get("paths"))
    sources = section.get("sources")
    for name, source in sources.items() if isinstance(sources, Mapping) else ():
        if not isinstance(source, Mapping):
            continue
        amount = [f"{key} {source[key]}" for key in ("weight", "tokens", "repeat") if source.get(key) is not None]
        lines.append(f"- source `{name}`{''.join(f', {words}' for words in amount)}")
        lines += [f"  {line}" for line in _paths(source.get("paths"))]
    order: dict[str, Any] = {key: section[key] for key in ORDER if section.get(key) is not None}
    if isinstance(section.get("instance_filter"), Mapping):
        order |= section["instance_filter"]
    return "\n".join(lines) + ("\n\n" + _table(order) if order else "")


def _paths(paths: Any) -> list[str]:
    given = [paths] if isinstance(paths, str) else paths if isinstance(paths, Sequence) else []
    names = [public_path(str(path)) for path in given]
    lines = [f"- `{name}`" for name in names[:MOST_PATHS]]
    return lines if len(names) <= MOST_PATHS else [*lines, f"- and {len(names) - MOST_PATHS} more files"]


def recipe(section: Any) -> str:
    """What the `training` section of a run says about learning."""
    if not isinstance(section, Mapping):
        return "Not recorded."
    rows: dict[str, Any] = {}
    for key in RECIPE:
        value = section.get(key)
        if isinstance(value, Mapping):
            rows |= {f"{key}.{name}": inner for name, inner in value.items() if inner is not None}
        elif value is not None:
            rows[key] = value
    return _table(rows)


def _front_matter(facts: CardFacts) -> str:
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- olmo", "- olmo_hf"]
    if facts.license is not None:
        lines.append(f"license: {facts.license}")
    source = _source(facts)
    if source is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        lines.append(f"base_model: {source}")
    return "---\n" + "\n".join(lines) + "\n---"


def _usage(facts: CardFacts) -> str:
    trust = "" if facts.config.stock_model_type is not None else ", trust_remote_code=True"
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{facts.name}"{trust})\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{facts.name}")\n```'
    )


def _architecture(facts: CardFacts) -> dict[str, Any]:
    config, count = facts.config, count_parameters(facts.config)
    return {
        "architecture": config.stock_model_type if config.stock_model_type is not None else config.model_type,
        "parameters": f"{count.total:,} ({count.non_embedding:,} without embeddings)",
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "attention heads": f"{config.num_attention_heads} (keys and values: {config.num_key_value_heads})",
        "vocabulary": f"{config.vocab_size:,} rows",
        "sequence length": f"{config.max_position_embeddings:,} tokens",
    }


def _metrics(metrics: Mapping[str, float]) -> dict[str, str]:
    return {name: f"{value:.6g}" for name, value in sorted(metrics.items())}


def _source(facts: CardFacts) -> str | None:
    section = facts.settings.get("model")
    source = section.get("init_from") if isinstance(section, Mapping) else None
    return None if source is None else public_path(str(source))


def _earlier_run(section: Any) -> str | None:
    """The checkpoint of another run from which this one went on, and what of it was left behind."""
    place = section.get("resume") if isinstance(section, Mapping) else None
    if place in (None, "auto", "never"):
        return None
    left = {"reset_optimizer": "with a new optimizer", "reset_trainer_state": "steps and tokens counted from zero"}
    said = [words for key, words in left.items() if section.get(key) is True]
    return "; ".join([public_path(str(place)), *said])


def _lineage(facts: CardFacts) -> dict[str, Any]:
    earlier, source = _earlier_run(facts.settings.get("training")), _source(facts)
    if earlier is not None:
        source = earlier
    if source is None:
        source = "random weights" if isinstance(facts.settings.get("model"), Mapping) else "not recorded"
    rows: dict[str, Any] = {"started from": source}
    if facts.step is not None:
        rows["step"] = f"{facts.step:,}"
    if facts.tokens is not None:
        rows["tokens seen"] = f"{facts.tokens:,}"
    return rows | dict(facts.versions)


def _table(rows: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])
