"""The model card of an average: what it is made of."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from olmo_hf.model.card import recipe, training_data
from olmo_hf.model.configuration_olmo import OlmoHfConfig
from olmo_hf.model.size import count_parameters


def write_average_card(
    name: str,
    config: OlmoHfConfig,
    lineage: Sequence[Mapping[str, Any]],
    settings: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Markdown with the front matter that the Hub reads.

    Args:
        name: Of the average.
        config: Its architecture.
        lineage: One mapping per ingredient: checkpoint, share, step, tokens, weights_sha256.
        settings: The resolved settings of the run of each ingredient, empty where they are not known.
    """
    count = count_parameters(config)
    trust = "" if config.stock_model_type is not None else ", trust_remote_code=True"
    rows = [
        f"| {one['checkpoint']} | {one['share']:.6g} | {_number(one['step'])} | {_number(one['tokens'])} | "
        f"`{one['weights_sha256']}` |"
        for one in lineage
    ]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            "tags:",
            "- olmo",
            "- olmo_hf",
            "- merge",
            "---",
            "",
            f"# {name}",
            "",
            f"The average of {len(lineage)} checkpoints of one architecture ({count.total:,} parameters).",
            "",
            "```python",
            "from transformers import AutoModelForCausalLM",
            "",
            f'model = AutoModelForCausalLM.from_pretrained("{name}"{trust})',
            "```",
            "",
            "## Training data",
            "",
            *_sections("data", training_data, lineage, settings),
            "## Recipe",
            "",
            *_sections("training", recipe, lineage, settings),
            "## Lineage",
            "",
            "Weighted mean of the weights, summed in float64 and rounded once. The optimizer's state is not averaged.",
            "",
            "| checkpoint | share | step | tokens | SHA-256 of its weights |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _sections(
    key: str,
    describe: Callable[[Any], str],
    lineage: Sequence[Mapping[str, Any]],
    settings: Sequence[Mapping[str, Any]],
) -> list[str]:
    """One text where all ingredients say the same, else one for each text with the ingredients it holds for."""
    texts: dict[str, list[str]] = {}
    for one, known in zip(lineage, settings or [{}] * len(lineage), strict=True):
        texts.setdefault(describe(known.get(key)), []).append(f"`{one['checkpoint']}`")
    if len(texts) == 1:
        return [*texts, ""]
    return [line for text, names in texts.items() for line in (f"{', '.join(names)}:", "", text, "")]


def _number(value: int | None) -> str:
    return "not recorded" if value is None else f"{value:,}"
