"""What every module got and gave at chosen steps, saved to be compared with another run."""

import fnmatch
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerControl, TrainerState, TrainingArguments

from olmo_hf.callbacks.args import ModelOutputsArgs
from olmo_hf.training.callback import OlmoCallback

logger = logging.getLogger(__name__)

ORDER = "order"
"""Metadata of a file: names of its tensors in the order in which they came about, as JSON."""


def model_outputs_path(run_dir: Path, step: int) -> Path:
    """Where inputs and outputs of the modules at `step` are saved."""
    return run_dir / "model-outputs" / f"step{step}.safetensors"


class ModelOutputs(OlmoCallback):
    """Saves the first forward pass of a step on rank 0: tensors `{module}.input` and `{module}.output`.

    Of a module that runs several times the later ones are called `{module}#2.input` and so on. The hooks are there for
    this one pass only: what activation checkpointing computes again is not saved, and other steps cost nothing. The
    head's output is the loss where head and loss are computed in one (`training.loss_implementation`).
    """

    def __init__(self, args: ModelOutputsArgs, *, run_dir: Path):
        self._steps = frozenset(args.steps)
        self._patterns = args.modules
        self._run_dir = run_dir
        self._handles: list[Any] = []
        self._saved: dict[str, torch.Tensor] = {}

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step, model = state.global_step + 1, kwargs["model"]
        if step not in self._steps or not state.is_world_process_zero:
            return
        self._saved = {}
        for name, module in model.named_modules():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns):
                self._handles.append(module.register_forward_hook(self._hook(name or "model"), with_kwargs=True))
        # Registered last, so that the model's own output is among what is saved.
        self._handles.append(model.register_forward_hook(lambda *_: self._finish(step)))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._remove_hooks()

    def _hook(self, name: str) -> Callable[..., None]:
        def save(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
            times = 1
            while any(f"{_numbered(name, times)}.{end}" in self._saved for end in ("input", "output")):
                times += 1
            for end, value in (("input", (*given, *named.values())), ("output", result)):
                tensor = next(_tensors(value), None)
                if tensor is not None:
                    self._saved[f"{_numbered(name, times)}.{end}"] = _copy(tensor)

        return save

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _finish(self, step: int) -> None:
        self._remove_hooks()
        path = model_outputs_path(self._run_dir, step)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            staged = path.with_suffix(".part")
            save_file(self._saved, staged, metadata={ORDER: json.dumps(list(self._saved))})
            staged.replace(path)
        except OSError as error:
            logger.warning("%s cannot be written (%s).", path, error)
        self._saved = {}


def _numbered(name: str, times: int) -> str:
    return name if times == 1 else f"{name}#{times}"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of arguments or of an output, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _tensors(inner)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().to("cpu", copy=True).contiguous()
