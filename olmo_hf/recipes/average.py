"""Averages of checkpoints ("soups"; Wortsman et al. 2022, arXiv:2203.05482), tensor by tensor.

Sums are kept in float64 and rounded once, so that an average of float32 weights is the float32 number nearest to the
true mean, and an average of equal checkpoints is that checkpoint bit for bit.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from olmo_hf.errors import CheckpointError, ConversionError
from olmo_hf.model.card import run_settings
from olmo_hf.model.conversion.convert import (
    DEFAULT_SHARD_BYTES,
    Checkpoint,
    carry_tokenizer,
    open_checkpoint,
    write_huggingface,
)
from olmo_hf.model.conversion.lazy import LazyTable, LazyTensor
from olmo_hf.recipes.average_card import write_average_card
from olmo_hf.training import commit

_HOW_IT_BEGAN = (
    "init_method",
    "initializer_range",
    "init_cutoff_factor",
    "embedding_initializer_range",
    "scale_embedding_init",
    "attention_dropout",
    "residual_dropout",
    "embedding_dropout",
)
"""Fields that say how a model was started or trained, not how its weights are used."""


@dataclass
class Ingredient:
    """One checkpoint that goes into an average.

    Attributes:
        given: The path as it was asked for.
        path: The checkpoint itself.
        weight: How much it counts.
        share: Its part of the whole; all shares add up to 1.
        checkpoint: Its configuration and tensors.
        step: Optimizer steps it was trained for, where it says so.
        tokens: Tokens it was trained on, where it says so.
        settings: Those of its run, where they lie beside it.
        digest: Running SHA-256 of its weights in the order they are written.
    """

    given: str
    path: Path
    weight: float
    share: float
    checkpoint: Checkpoint
    step: int | None = None
    tokens: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    digest: Any = field(default_factory=hashlib.sha256)

    def as_json(self) -> dict[str, Any]:
        """What is remembered of it."""
        told = {"checkpoint": self.given, "share": self.share, "step": self.step, "tokens": self.tokens}
        return told | {"kind": self.checkpoint.kind, "weights_sha256": self.digest.hexdigest()}


def open_ingredients(paths: Sequence[Path], weights: Sequence[float] | None = None) -> list[Ingredient]:
    """Opens checkpoints and makes sure that they can be averaged.

    Args:
        paths: Checkpoints of any kind that `olmo-hf convert` reads, or run directories (their newest one).
        weights: One positive number each, in any unit. None: all count the same.

    Raises:
        ConversionError: Fewer than two, the same one twice, or architectures, tensors or tokenizers that differ;
            all problems at once.
        CheckpointError: A checkpoint of a run is damaged.
    """
    if len(paths) < 2:
        raise ConversionError(f"found {len(paths)} checkpoint, expected at least two to average")
    counts = [1.0] * len(paths) if weights is None else [float(weight) for weight in weights]
    if len(counts) != len(paths) or not all(0 < weight < float("inf") for weight in counts):
        raise ConversionError(f"--weights: found {counts}, expected one number above 0 for each of {len(paths)}")
    found = [_open(path, weight, weight / sum(counts)) for path, weight in zip(paths, counts, strict=True)]
    problems = _problems(found)
    if problems:
        raise ConversionError(
            "these checkpoints cannot be averaged; leave out those that differ:\n"
            + "\n".join(f"  - {p}" for p in problems)
        )
    return found


def average(
    ingredients: Sequence[Ingredient],
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> list[str]:
    """Writes the average as a Hugging Face checkpoint with tokenizer, model card and `lineage.json`.

    Args:
        ingredients: From `open_ingredients`.
        target: Directory to make; it appears only when everything is in it.
        dtype: Of the result. None: that of the ingredients, or float32 where they differ.
        max_shard_bytes: Size above which the weights are cut into several files.

    Returns:
        Notices for the user.

    Raises:
        ConversionError: The target exists, or a weight is not a finite number.
    """
    if target.exists():
        raise ConversionError(f"{target}: exists; nothing is overwritten: choose another name or remove it")
    first = ingredients[0].checkpoint
    names = [name for name in first.weights if name in _names(first)]
    table: LazyTable = {
        name: LazyTensor(
            first.weights[name].shape,
            _dtype_of(ingredients, name) if dtype is None else dtype,
            partial(_mean, ingredients, name, dtype),
        )
        for name in names
    }
    staging = target.with_name(f".{target.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        wanted = replace(first, weights=table, optimizer={}, counters={})
        write_huggingface(wanted, staging, max_shard_bytes=max_shard_bytes)
        notices = _carry_tokenizer(ingredients, wanted, staging)
        lineage = [ingredient.as_json() for ingredient in ingredients]
        content = {"method": "weighted mean in float64, rounded once", "ingredients": lineage}
        (staging / "lineage.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        card = write_average_card(target.name, first.config, lineage, [one.settings for one in ingredients])
        (staging / "README.md").write_text(card, encoding="utf-8")
        os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return notices


def _open(given: Path, weight: float, share: float) -> Ingredient:
    path = given
    if (path / commit.LATEST).exists() and not (path / "config.json").exists():
        path = (path / commit.LATEST).resolve()
    ingredient = Ingredient(str(given), path, weight, share, open_checkpoint(path))
    ingredient.settings = run_settings(path)
    if (path / commit.MANIFEST).is_file():
        manifest = commit.require_whole(path)
        ingredient.step, ingredient.tokens = manifest.step, manifest.tokens
    return ingredient


def _problems(ingredients: Sequence[Ingredient]) -> list[str]:
    first, *others = ingredients
    problems = []
    for place, one in enumerate(ingredients):
        if any(one.path.resolve() == other.path.resolve() for other in ingredients[:place]):
            problems.append(f"{one.given}: is given twice; use --weights to let one count more")
    for one in others:
        problems += _differences(first, one)
    tokenizers = {one.given: digest for one in ingredients if (digest := _tokenizer_digest(one.path)) is not None}
    if len(set(tokenizers.values())) > 1:
        problems.append(f"their tokenizers differ: {', '.join(tokenizers)}; the same id would mean different tokens")
    return problems


def _differences(first: Ingredient, other: Ingredient) -> list[str]:
    ours, theirs = (one.checkpoint.config.to_init_dict() for one in (first, other))
    problems = [
        f"{other.given}: {name} is {theirs[name]!r}, in {first.given} it is {ours[name]!r}"
        for name in ours
        if name not in _HOW_IT_BEGAN and ours[name] != theirs[name]
    ]
    mine, its = _names(first.checkpoint), _names(other.checkpoint)
    if mine != its:
        problems.append(f"{other.given}: other tensors than {first.given}: {', '.join(sorted(mine ^ its)[:5])}")
    for name in sorted(mine & its):
        shapes = first.checkpoint.weights[name].shape, other.checkpoint.weights[name].shape
        if shapes[0] != shapes[1]:
            problems.append(f"{other.given}: {name} has shape {shapes[1]}, in {first.given} {shapes[0]}")
    return problems


def _names(checkpoint: Checkpoint) -> set[str]:
    """Names of the weights; a tied head may be stored or not."""
    tied = {"lm_head.weight"} if checkpoint.config.tie_word_embeddings else set()
    return set(checkpoint.weights) - tied


def _dtype_of(ingredients: Sequence[Ingredient], name: str) -> torch.dtype:
    found = {one.checkpoint.weights[name].dtype for one in ingredients}
    return found.pop() if len(found) == 1 else torch.float32


def _mean(ingredients: Sequence[Ingredient], name: str, dtype: torch.dtype | None) -> torch.Tensor:
    total: torch.Tensor | None = None
    for one in ingredients:
        tensor = one.checkpoint.weights[name].read()
        if not torch.isfinite(tensor).all():
            raise ConversionError(f"{one.given}: {name} holds numbers that are not finite; leave this checkpoint out")
        one.digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        part = tensor.double() * one.weight
        total = part if total is None else total.add_(part)
    assert total is not None
    total /= sum(one.weight for one in ingredients)
    return total.to(_dtype_of(ingredients, name) if dtype is None else dtype)


def _tokenizer_digest(path: Path) -> str | None:
    """Of what a tokenizer says, not of how its file is written."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: is not readable as JSON ({error}); choose a whole checkpoint") from error
    for passing in ("truncation", "padding"):
        content.pop(passing, None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _carry_tokenizer(ingredients: Sequence[Ingredient], wanted: Checkpoint, target: Path) -> list[str]:
    for one in ingredients:
        if _tokenizer_digest(one.path) is not None:
            return carry_tokenizer(one.path, None, wanted.config, target)
    return ["none of the checkpoints has a tokenizer, so none comes along"]
