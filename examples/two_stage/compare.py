"""Measures several models on the same held-out text and prints them side by side.

python examples/two_stage/compare.py examples/two_stage/stage2.yaml stage1=runs/two-stage/stage1/latest ... \
    --output runs/two-stage/comparison

Every model is loaded with stock transformers and judged by the evaluators of the configuration. `OUTPUT.md` and
`OUTPUT.json` hold the table. A model that is no run of its own, such as an average, gets a `metrics.jsonl`, so that
`olmo-hf report` draws it beside the others.
"""

import argparse
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from olmo_hf.config_file import load_run
from olmo_hf.evaluation.build import build_evaluators
from olmo_hf.model.build import vocabulary_of

LOSS = "CrossEntropyLoss"


def measure(config: Path, checkpoint: Path) -> dict[str, float]:
    """Cross-entropy and perplexity on every set of the configuration's `evaluation` section."""
    run = load_run(config)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    evaluators = build_evaluators(
        run.evaluation,
        per_device_eval_batch_size=run.training.per_device_eval_batch_size,
        **vocabulary_of(model.config),
    )
    metrics: dict[str, float] = {}
    with torch.no_grad():
        for evaluator in evaluators:
            metrics |= evaluator.evaluate(model, device=torch.device("cpu"), autocast=contextlib.nullcontext)
    return metrics


def table(measured: dict[str, dict[str, float]]) -> list[str]:
    """Markdown: one line per model; the best loss of each set in bold."""
    keys = [key for key in next(iter(measured.values())) if key.endswith(LOSS)]
    labels = [key.split("/")[1] for key in keys]
    best = {key: min(metrics[key] for metrics in measured.values()) for key in keys}
    lines = [
        "| model | " + " | ".join(f"{label}: loss | perplexity" for label in labels) + " |",
        "|---|" + "---:|---:|" * len(keys),
    ]
    for name, metrics in measured.items():
        cells = []
        for key in keys:
            loss = f"{metrics[key]:.4f}"
            cells += [f"**{loss}**" if metrics[key] == best[key] else loss]
            cells += [f"{metrics[key.replace(LOSS, 'Perplexity')]:.3f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def lineage_of(checkpoint: Path) -> list[dict[str, Any]]:
    """The ingredients of an average; of anything else none."""
    file = checkpoint / "lineage.json"
    return json.loads(file.read_text(encoding="utf-8"))["ingredients"] if file.is_file() else []


def against_ingredients(places: dict[str, Path], measured: dict[str, dict[str, float]]) -> list[str]:
    """One line per average: its losses less the mean loss of its ingredients, where all of them were measured too."""
    lines = []
    for name, place in places.items():
        wanted = [Path(one["checkpoint"]).resolve() for one in lineage_of(place)]
        found = [other for other, at in places.items() if {at.resolve(), at.parent.resolve()} & set(wanted)]
        if not wanted or len(found) != len(wanted):
            continue
        told = []
        for key in (key for key in measured[name] if key.endswith(LOSS)):
            mean = sum(measured[other][key] for other in found) / len(found)
            told.append(f"{key.split('/')[1]} {measured[name][key] - mean:+.4f}")
        lines.append(f"{name} less the mean of {', '.join(found)}: {', '.join(told)}")
    return lines


def record_if_alone(checkpoint: Path, metrics: dict[str, float]) -> None:
    """One row of `metrics.jsonl` beside a model that no run has written."""
    for first in lineage_of(checkpoint)[:1]:
        row = {"step": first["step"], "tokens": first["tokens"], "time": time.time(), **metrics}
        (checkpoint / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a run's YAML: its `evaluation` section says what is measured")
    parser.add_argument("models", nargs="+", metavar="NAME=CHECKPOINT")
    parser.add_argument("--output", type=Path, required=True, help="file to write, without .md and .json")
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()
    measured: dict[str, dict[str, float]] = {}
    places: dict[str, Path] = {}
    for word in options.models:
        name, equals, place = word.partition("=")
        if not equals or not Path(place).is_dir():
            parser.error(f"{word}: expected NAME=CHECKPOINT with a checkpoint directory that exists")
        places[name] = Path(place)
        measured[name] = measure(options.config, places[name])
        record_if_alone(places[name], measured[name])
    lines = [*table(measured), "", *against_ingredients(places, measured)]
    print("\n".join(lines))
    options.output.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    options.output.with_suffix(".json").write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
