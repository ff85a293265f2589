"""Marks the steps at which the loss jumps, so that somebody can ask later what the model saw."""

import dataclasses
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from olmo_hf.callbacks.args import LossSpikeArgs
from olmo_hf.callbacks.json_lines import JsonLinesFile
from olmo_hf.data.order import DataPosition
from olmo_hf.training.callback import OlmoCallback

logger = logging.getLogger(__name__)

# Median absolute deviation of a normal distribution with standard deviation 1, inverted.
_MAD_TO_STANDARD_DEVIATION = 1.4826


def spike_instances_path(run_dir: Path, rank: int) -> Path:
    """Where the instances that `rank` read at the steps of a spike are kept."""
    return run_dir / "loss-spikes" / f"rank{rank}.jsonl"


def robust_z_score(value: float, window: Sequence[float]) -> float:
    """How many standard deviations `value` lies above the median of `window`, both estimated without its outliers.

    The deviation is 1.4826 times the median absolute deviation. A window without any spread gives infinity for
    another value and 0 for the same; a value that is not finite gives infinity.
    """
    if not math.isfinite(value):
        return math.inf
    middle = statistics.median(window)
    deviation = _MAD_TO_STANDARD_DEVIATION * statistics.median(abs(other - middle) for other in window)
    if deviation == 0:
        return math.copysign(math.inf, value - middle) if value != middle else 0.0
    return (value - middle) / deviation


class LossSpike(OlmoCallback):
    """Compares each logged cross-entropy with the logged ones before it; a spike becomes an event of the run.

    A spike lasts until the loss is back under half the threshold; only its first step is an event. While it lasts the
    window does not move, or it would become the normal state of things. A window's length after its beginning it
    counts as a new level: it is over, and the window starts afresh. The instances that each rank read since the last
    log are kept in `loss-spikes/`.

    With `max_rollbacks` the run goes back to the last checkpoint before a spike and passes over the batches it has
    read since. The count is of the whole run, and restarts do not lose it.

    Args:
        record: writes an event (`MetricsFile.event`).
        run_dir: directory of the run.
        rank: of this process.
    """

    def __init__(self, args: LossSpikeArgs, record: Callable[..., None], *, run_dir: Path, rank: int):
        self.max_rollbacks = args.max_rollbacks
        self._threshold = args.threshold
        self._min_steps = args.min_steps
        self._window: deque[float] = deque(maxlen=args.window_steps)
        self._record = record
        self._kept = JsonLinesFile(spike_instances_path(run_dir, rank))
        self._instances: dict[int, list[int]] = {}  # since the last log, by step
        self._spiking_for = 0
        self._rollbacks = 0
        self._wants_to_go_back = False

    def on_instances(self, state: TrainerState, instance_ids: list[int]) -> None:
        self._instances[state.global_step + 1] = instance_ids

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "train/CrossEntropyLoss" not in logs:
            return
        loss = logs["train/CrossEntropyLoss"]
        score = robust_z_score(loss, self._window) if len(self._window) >= self._min_steps else 0.0
        threshold = self._threshold if not self._spiking_for else self._threshold / 2
        if score < threshold:
            self._spiking_for = 0
            if math.isfinite(loss):
                self._window.append(loss)
        else:
            self._spiking_for += 1
            if self._spiking_for == 1:
                self._mark(state, loss, score, logs)
                self._wants_to_go_back = self._rollbacks < self.max_rollbacks
            elif self._window.maxlen is not None and self._spiking_for >= self._window.maxlen:
                self._spiking_for = 0
                self._window.clear()
        self._instances.clear()

    def _mark(self, state: TrainerState, loss: float, score: float, logs: dict[str, float]) -> None:
        usual = statistics.median(self._window)
        if state.is_world_process_zero:
            logger.warning(
                "Loss spike at step %d: %.4f where %.4f was usual (%.1f deviations).",
                state.global_step,
                loss,
                usual,
                score,
            )
        details = {"loss": loss, "usual": usual, "deviations": score}
        if "optim/total_grad_norm" in logs:
            details["gradient_norm"] = logs["optim/total_grad_norm"]
        self._record(state, "loss_spike", **details)
        if self._instances:
            self._kept.append({"step": state.global_step, "time": time.time(), "instances": self._instances})

    def wants_to_go_back(self) -> bool:
        """Whether a spike has just begun and the run has not gone back too often."""
        wants, self._wants_to_go_back = self._wants_to_go_back, False
        return wants

    def on_gone_back(self, state: TrainerState, from_step: int, position: DataPosition | None) -> None:
        if position is None:
            if state.is_world_process_zero:
                logger.warning("There is no whole checkpoint before step %d to go back to; going on.", from_step)
            self._record(state, "rollback_impossible")
            return
        self._rollbacks += 1
        passed_over = from_step - state.global_step
        if state.is_world_process_zero:
            logger.warning(
                "Went back from step %d to the checkpoint of step %d; the %d batches in between are passed over "
                "(%d of at most %d times).",
                from_step,
                state.global_step,
                passed_over,
                self._rollbacks,
                self.max_rollbacks,
            )
        self._record(
            state,
            "rollback",
            from_step=from_step,
            passed_over_batches=passed_over,
            count=self._rollbacks,
            position=dataclasses.asdict(position),
        )

    def state_dict(self) -> dict[str, Any]:
        """The window, so that a restart does not make it blind, and how often the run went back."""
        return {"window": list(self._window), "spiking_for": self._spiking_for, "rollbacks": self._rollbacks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window.clear()
        self._window.extend(state["window"])
        self._spiking_for = state["spiking_for"]
        # Going back brings the state of an earlier step; how often that was done is not undone by it.
        self._rollbacks = max(self._rollbacks, state.get("rollbacks", 0))
        self._instances.clear()
