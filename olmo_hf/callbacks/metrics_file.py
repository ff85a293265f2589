"""`metrics.jsonl`: every logged step, kept without any tracker; `events.jsonl`: starts, checkpoints, the end."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from olmo_hf.callbacks.json_lines import EVENTS_FILE, METRICS_FILE, JsonLinesFile
from olmo_hf.data.order import OrderedDataset
from olmo_hf.training.callback import OlmoCallback


class MetricsFile(OlmoCallback):
    """One line per log: `step`, `tokens` (of all ranks, over the whole run), `time` (Unix seconds), then the metrics.

    Files are appended to, never truncated: after a restart that went back steps appear twice, and the later line
    counts. Rank 0 only. Hugging Face's closing summary of a launch goes to the events.
    """

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.time):
        self._metrics = JsonLinesFile(run_dir / METRICS_FILE)
        self._events = JsonLinesFile(run_dir / EVENTS_FILE)
        self._clock = clock

    def event(self, state: TrainerState, name: str, **details: Any) -> None:
        """Records that something happened at the present step. Does nothing on ranks other than 0."""
        if state.is_world_process_zero:
            self._events.append({**self._stamp(state), "event": name, **details})

    def _stamp(self, state: TrainerState) -> dict[str, Any]:
        return {"step": state.global_step, "tokens": state.num_input_tokens_seen, "time": self._clock()}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        data = getattr(kwargs.get("train_dataloader"), "dataset", None)
        details = {"position": dataclasses.asdict(data.start)} if isinstance(data, OrderedDataset) else {}
        self.event(state, "start", max_steps=state.max_steps, world_size=args.world_size, **details)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or not state.is_world_process_zero:
            return
        if "train_runtime" in logs:
            self.event(state, "summary", **logs)
        else:
            self._metrics.append({**self._stamp(state), **logs})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.event(state, "checkpoint")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.event(state, "end", max_steps=state.max_steps)
