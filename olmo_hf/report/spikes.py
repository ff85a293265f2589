"""What the model saw when the loss spiked: instance ids from the record, their source and their text."""

import datetime
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from olmo_hf.callbacks.data_indices import read_data_indices
from olmo_hf.callbacks.json_lines import read_json_lines
from olmo_hf.callbacks.loss_spike import spike_instances_path
from olmo_hf.data.build import build_eval_data
from olmo_hf.data.collator import DataCollator
from olmo_hf.errors import OlmoHfError
from olmo_hf.report.history import History

if TYPE_CHECKING:
    from olmo_hf.args import RunArgs

logger = logging.getLogger(__name__)

MAX_SPIKES = 50
"""The latest ones; a report is no archive."""

MAX_INSTANCES = 64
"""Of one spike, over all ranks."""

MAX_CHARACTERS = 1500
"""Of one instance's text."""


@dataclass(frozen=True)
class Source:
    """The data of a run, to look instances up."""

    dataset: Any
    collate: DataCollator
    tokenizer: Any
    """None: token ids are shown instead of text."""

    settings: "RunArgs"
    """Of the run."""

    def text(self, instance: int) -> str:
        """The beginning of an instance, decoded."""
        ids = self.dataset[instance]["input_ids"].tolist()
        text = " ".join(map(str, ids)) if self.tokenizer is None else self.tokenizer.decode(ids)
        return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " [...]"

    def place(self, instance: int) -> str:
        """File and position in it, in tokens."""
        path, _, offset = self.dataset.locate(instance)
        return f"{path}, token {offset:,}"


def open_source(run: History) -> Source:
    """The data set and tokenizer that `config.yaml` of the run names.

    Raises:
        OlmoHfError: the settings or the data are not there any more, or have changed.
    """
    from olmo_hf.config_file import load_run
    from olmo_hf.model.build import load_tokenizer

    settings = load_run(run.run_dir / "config.yaml")
    dataset, collate = build_eval_data(settings.data, eos_token_id=None, pad_token_id=None, vocab_size=None)
    try:
        tokenizer = load_tokenizer(settings.model)
    except OlmoHfError as error:
        logger.warning("The tokenizer of %s cannot be loaded, token ids are shown: %s", run.name, error)
        tokenizer = None
    return Source(dataset, collate, tokenizer, settings)


def describe_spikes(run: History, *, explain: bool = False) -> list[dict[str, Any]]:
    """For the page: title, instances (title, text), settings and a note for each spike, newest last.

    Args:
        explain: also compute the loss of every instance with the last checkpoint before the spike.
    """
    events = run.events_called("loss_spike")[-MAX_SPIKES:]
    if not events:
        return []
    source, why_not = None, ""
    try:
        source = open_source(run)
    except (OlmoHfError, OSError) as error:
        why_not = f"The data of this run cannot be read here, so there is no text: {error}"
    recorded = _ids_of_steps(run.run_dir, {event["step"] for event in events})
    described = []
    for event in events:
        ids = _kept_ids(run.run_dir, event)
        ids = ids if ids else recorded.get(event["step"], {})
        described.append(_describe(run, event, ids, source, why_not, explain=explain))
    return described


def _kept_ids(run_dir: Path, event: dict[str, Any]) -> dict[int, list[int]]:
    """Rank -> instance ids that were kept when the spike was found; they stay right also after the run went back."""
    found: dict[int, list[int]] = {}
    while (path := spike_instances_path(run_dir, len(found))).is_file():
        rows = [row for row in read_json_lines(path) if row.get("step") == event["step"] and "instances" in row]
        if not rows:
            break
        nearest = min(rows, key=lambda row: abs(row.get("time", 0.0) - event.get("time", 0.0)))
        found[len(found)] = [one for instances in nearest["instances"].values() for one in instances]
    return found


def _ids_of_steps(run_dir: Path, steps: set[int]) -> dict[int, dict[int, list[int]]]:
    """Step -> rank -> instance ids."""
    found: dict[int, dict[int, list[int]]] = {}
    for path in sorted((run_dir / "data-indices").glob("rank*.tsv.gz")):
        rank = int(path.name.removeprefix("rank").removesuffix(".tsv.gz"))
        for step, instances in read_data_indices(path, range(min(steps), max(steps) + 1)).items():
            if step in steps:
                found.setdefault(step, {})[rank] = instances
    return found


def _describe(
    run: History,
    event: dict[str, Any],
    by_rank: dict[int, list[int]],
    source: Source | None,
    why_not: str,
    *,
    explain: bool,
) -> dict[str, Any]:
    step = event["step"]
    numbers = {key: event[key] for key in ("loss", "usual", "deviations", "gradient_norm") if key in event}
    facts = ", ".join(f"{key.replace('_', ' ')} {value:.4g}" for key, value in numbers.items())
    pairs = [(rank, instance) for rank in sorted(by_rank) for instance in by_rank[rank]]
    notes = [why_not] if why_not else []
    if not pairs:
        notes.append("The instances of this step were not recorded (callbacks.data_indices).")
    losses: dict[int, float] = {}
    if explain and source is not None and pairs:
        losses, note = losses_before(run.run_dir, step, [instance for _, instance in pairs], source)
        notes.append(note)
        pairs.sort(key=lambda pair: -losses.get(pair[1], -math.inf))
    if len(pairs) > MAX_INSTANCES:
        notes.append(f"{len(pairs) - MAX_INSTANCES} more instances are not shown.")
    return {
        "step": step,
        "title": f"step {step:,}: {facts}",
        "instances": [_instance(rank, one, source, losses.get(one)) for rank, one in pairs[:MAX_INSTANCES]],
        "settings": settings_at(run, event.get("time")),
        "note": " ".join(notes),
    }


def settings_at(run: History, time: Any) -> str:
    """The YAML of the last launch that had begun by this moment (seconds since 1970); empty where it is not known."""
    if not isinstance(time, int | float):
        return ""
    begun: list[tuple[float, str]] = []
    for launch in run.launches:
        try:
            began = datetime.datetime.fromisoformat(str(launch.get("time"))).timestamp()
        except ValueError:
            continue
        if began <= time:
            begun.append((began, str(launch.get("config") or "")))
    return sorted(begun, key=lambda one: one[0])[-1][1] if begun else ""


def _instance(rank: int, instance: int, source: Source | None, loss: float | None) -> dict[str, str]:
    title = f"instance {instance:,} (rank {rank})"
    if loss is not None:
        title += f", cross-entropy {loss:.4f}"
    if source is None:
        return {"title": title, "text": ""}
    try:
        return {"title": f"{title}, {source.place(instance)}", "text": source.text(instance)}
    except (OlmoHfError, OSError, IndexError) as error:
        return {"title": title, "text": f"(cannot be read: {error})"}


def losses_before(run_dir: Path, step: int, instances: list[int], source: Source) -> tuple[dict[int, float], str]:
    """Mean cross-entropy of each instance under the newest checkpoint before `step`, and a note about it."""
    from olmo_hf.training import commit

    for checkpoint in commit.list_checkpoints(run_dir):
        if commit.step_of(checkpoint) >= step:
            continue
        try:
            commit.verify(checkpoint)
            model = _model_of(checkpoint, source.settings)
        except OlmoHfError as error:
            logger.warning("passed over: %s", error)
            continue
        losses = {one: loss_of(model, source, one) for one in dict.fromkeys(instances)}
        return losses, f"Losses of the instances were computed with {checkpoint.name}."
    return {}, "There is no whole checkpoint before this step, so losses of single instances are not known."


def _model_of(checkpoint: Path, settings: "RunArgs") -> torch.nn.Module:
    """The run's model with the weights of a checkpoint of any kind, for evaluation."""
    from olmo_hf.model.build import build_model, load_tokenizer
    from olmo_hf.training.checkpoints import restore_tensors

    length = settings.data.sequence_length
    tokenizer = load_tokenizer(settings.model, model_max_length=length)
    model = build_model(
        settings.model, seed=settings.training.seed, tokenizer=tokenizer, max_position_embeddings=length
    )
    restore_tensors(checkpoint, model, None)
    return model.eval()


@torch.no_grad()
def loss_of(model: Callable[..., Any], source: Source, instance: int) -> float:
    """Mean cross-entropy of one instance over its labelled targets; NaN without any."""
    from olmo_hf.evaluation.perplexity import MODEL_INPUTS, cross_entropy_sums

    batch = source.collate([source.dataset[instance]])
    inputs = {name: batch[name] for name in MODEL_INPUTS if name in batch}
    sums, counts = cross_entropy_sums(model(**inputs, use_cache=False).logits, batch["labels"])
    return float(sums[0] / counts[0]) if counts[0] > 0 else math.nan
