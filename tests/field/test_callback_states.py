"""What a callback has learned survives a restart, or belongs to one launch and is named here with its reason."""

import ast
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from olmo_hf.training.callback import OlmoCallback
from tests.training.small import tiny, trainer_of

CALLBACKS = sorted((Path(__file__).parents[2] / "olmo_hf" / "callbacks").glob("*.py"))

OF_ONE_LAUNCH = {
    "Cancellation": {
        "_cancelled_at": "a launch that continues was not asked to stop",
        "_loss": "of the last logged step; read in the same step",
        "_started_at": "the time limit is one of a launch",
        "stop_reason": "why this launch ends",
    },
    "Console": {
        "_checkpoint_shown_at": "what this terminal showed",
        "_first": "where this launch began",
        "_last_logs": "what this terminal showed",
        "_pending": "what this terminal showed",
        "_shown_at": "what this terminal showed",
        "_started_at": "when this launch began",
    },
    "DataIndices": {"_warned": "a disk that was full may have room again"},
    "GarbageCollector": {"_was_enabled": "of this process"},
    "Heartbeat": {
        "_last": "when this process last made progress",
        "_main_thread": "of this process",
        "_stop": "of this process's thread",
        "_stepped": "the first step of every launch compiles",
        "_told": "one standstill is told once; a restart ends it",
    },
    "LossSpike": {"_wants_to_go_back": "asked for and answered within a step"},
    "ModelOutputs": {"_handles": "of this process", "_saved": "of one step"},
    "Profiler": {"_profile": "counts the steps of this launch"},
    "SpeedMonitor": {
        "_mark": "a moment of this process",
        "_peak_flops": "of this device",
        "_phase_seconds": "since the last logged step",
        "_step_seconds": "of one step",
        "_tokens_at_step_end": "tokens of an earlier launch are not its speed",
        "_world_size": "of this launch",
    },
    "Upload": {"_failed": "told once a launch", "_stop": "of this process", "_thread": "of this process"},
}
"""Fields of callbacks that change while training and need not survive."""


def changing_fields(declared: ast.ClassDef) -> set[str]:
    """Fields of `self` that are set anywhere but in `__init__` and in what brings a saved state back."""
    found = set()
    for method in declared.body:
        if not isinstance(method, ast.FunctionDef) or method.name in ("__init__", "load_state_dict"):
            continue
        for node in ast.walk(method):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                found.add(node.attr)
    return found


def restored_fields(declared: ast.ClassDef) -> set[str]:
    """Fields of `self` that `load_state_dict` sets or fills."""
    for method in declared.body:
        if isinstance(method, ast.FunctionDef) and method.name == "load_state_dict":
            return {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
    return set()


def test_every_field_that_changes_is_saved_or_of_one_launch() -> None:
    lost, found_classes = [], set()
    for path in CALLBACKS:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef) or "OlmoCallback" not in [ast.unparse(base) for base in node.bases]:
                continue
            found_classes.add(node.name)
            changing = changing_fields(node)
            of_launch = OF_ONE_LAUNCH.get(node.name, {}).keys()
            lost += [f"{node.name}.{name}" for name in changing - restored_fields(node) - of_launch]
            lost += [f"{node.name}.{name} is named, but never changes" for name in of_launch - changing]
    assert not lost, "restore them in `load_state_dict`, or say here why they belong to one launch:\n" + "\n".join(
        lost
    )
    assert OF_ONE_LAUNCH.keys() <= found_classes


class Counter(OlmoCallback):
    """Counts the steps of a run in strides of its own."""

    def __init__(self, stride: int):
        self.stride, self.counted = stride, 0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.counted += self.stride

    def state_dict(self) -> dict[str, Any]:
        return {"counted": self.counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counted = state["counted"]


def test_two_callbacks_of_one_class_are_both_restored(tmp_path: Path) -> None:
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(8 * 16).view(8, 16)]
    settings = {"per_device_train_batch_size": 1, "save_strategy": "steps", "save_steps": 2}

    def run(max_steps: int, **resume: Any) -> list[int]:
        counters = [Counter(1), Counter(10)]
        trainer = trainer_of(tmp_path, tiny(), rows, max_steps=max_steps, **settings)
        for counter in counters:
            trainer.add_callback(counter)
        trainer.train(**resume)
        return [counter.counted for counter in counters]

    assert run(2) == [2, 20]
    assert run(5, resume_from_checkpoint=True) == [5, 50]
