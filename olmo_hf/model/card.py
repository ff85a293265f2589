"""The model card of a checkpoint: what the model is, what it read, how it was trained, how well it does."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.size import count_parameters

# Settings that say what was learned and how; the rest of a run's settings is about the machine.
RECIPE = (
    "max_duration",
    "global_train_batch_size",
    "learning_rate",
    "scheduler",
    "optimizer",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
    "max_grad_norm",
    "max_grad_norm_ratio",
    "z_loss_weight",
    "loss_denominator",
    "decay_norm_and_bias",
    "decay_embeddings",
    "seed",
    "bf16",
    "fp16",
)
MOST_PATHS = 20


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


def write_card(facts: CardFacts) -> str:
    """Markdown with the front matter that the Hub reads."""
    parts = [
        _front_matter(facts),
        f"# {facts.name}",
        "A causal language model pretrained with olmo_hf.",
        _usage(facts),
        "## Model\n\n" + _table(_architecture(facts)),
        "## Training data\n\n" + _data(facts.settings.get("data")),
        "## Recipe\n\n" + _recipe(facts.settings.get("training")),
        "## Metrics\n\n" + (_table(_metrics(facts.metrics)) if facts.metrics else "None were recorded."),
        "## Lineage\n\n" + _table(_lineage(facts)),
    ]
    return "\n\n".join(parts) + "\n"


def public_path(path: str) -> str:
    """A data path without what gives access to it: user names, passwords and signed queries of addresses."""
    return re.sub(r"(?<=://)[^/@]*@", "", path.split("?", 1)[0])


def _front_matter(facts: CardFacts) -> str:
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- olmo", "- olmo_hf"]
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


def _data(section: Any) -> str:
    if not isinstance(section, Mapping):
        return "Not recorded."
    lines = []
    if section.get("mix") is not None:
        lines.append(f"- mix `{section['mix']}`")
    paths = [public_path(str(path)) for path in section.get("paths") or []]
    lines += [f"- `{path}`" for path in paths[:MOST_PATHS]]
    if len(paths) > MOST_PATHS:
        lines.append(f"- and {len(paths) - MOST_PATHS} more files")
    order = {key: section[key] for key in ("seed", "shuffle", "document_masking") if section.get(key) is not None}
    return "\n".join(lines) + ("\n\n" + _table(order) if order else "")


def _recipe(section: Any) -> str:
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


def _metrics(metrics: Mapping[str, float]) -> dict[str, str]:
    return {name: f"{value:.6g}" for name, value in sorted(metrics.items())}


def _source(facts: CardFacts) -> str | None:
    section = facts.settings.get("model")
    source = section.get("init_from") if isinstance(section, Mapping) else None
    return None if source is None else public_path(str(source))


def _lineage(facts: CardFacts) -> dict[str, Any]:
    source = _source(facts)
    rows: dict[str, Any] = {"started from": "random weights" if source is None else source}
    if facts.step is not None:
        rows["step"] = f"{facts.step:,}"
    if facts.tokens is not None:
        rows["tokens seen"] = f"{facts.tokens:,}"
    return rows | dict(facts.versions)


def _table(rows: Mapping[str, Any]) -> str:
    lines = [f"| {name} | {str(value).replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])
