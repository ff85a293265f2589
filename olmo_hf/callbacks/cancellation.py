"""Stopping early and cleanly: every rank at the same step, with a checkpoint, saying why."""

import logging
import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from olmo_hf import distributed
from olmo_hf.callbacks.args import CancellationArgs
from olmo_hf.callbacks.stop_signals import StopSignals
from olmo_hf.callbacks.wandb_tags import TagWatch
from olmo_hf.data.order import DataPosition
from olmo_hf.training.callback import OlmoCallback
from olmo_hf.wording import moment_of

logger = logging.getLogger(__name__)

CANCEL_FILE = "CANCEL"
"""A file of this name in the run directory stops the run; it is removed when it is obeyed."""


class StopReason(Enum):
    """Why a run stopped before its end, and the exit code that says so. In order of precedence."""

    SIGTERM = ("SIGTERM", 128 + signal.SIGTERM)
    SIGINT = ("SIGINT", 128 + signal.SIGINT)
    SIGUSR1 = ("SIGUSR1", 128 + signal.SIGUSR1)
    CANCEL_FILE = ("CANCEL file", 3)
    TRACKER_TAG = ("tag on the tracker", 3)
    EARLY_STOPPING = ("early stopping", 4)
    # 75 is EX_TEMPFAIL: nothing is wrong, launch again.
    TIME_LIMIT = ("time limit", 75)
    DEADLINE = ("deadline", 75)
    JOB_END = ("end of the job", 75)

    def __init__(self, words: str, exit_code: int):
        self.words = words
        self.exit_code = exit_code


class Cancellation(OlmoCallback):
    """Looks for reasons to stop every `interval_steps` and lets all ranks agree by one small sum.

    An evaluation is cut short for the same reasons except the loss; the stop follows at the end of a step. Then:
    a checkpoint at this step, `extra_steps` more steps without checkpoint or evaluation (their metrics overlap those
    of the launch that continues), and the end. Any rank may bring a signal; the other reasons are rank 0's.

    Args:
        run_dir: where the file CANCEL is looked for.
        last_step: the step at which this launch ends anyway.
        early_stopping_after_steps: before this step the loss stops nothing (the end of the warm-up).
        record: writes an event (`MetricsFile.event`).
        clock: seconds, monotonic.
        wall_clock: seconds since 1970.
        environment: of the process; `SLURM_JOB_END_TIME` is read.

    Raises:
        ConfigError: the deadline is no moment.
    """

    def __init__(
        self,
        args: CancellationArgs,
        *,
        run_dir: Path,
        last_step: int,
        early_stopping_after_steps: int = 0,
        record: Callable[..., None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        environment: Mapping[str, str] = os.environ,
    ):
        self.stop_reason: StopReason | None = None
        self._args = args
        self._file = run_dir / CANCEL_FILE
        self._last_step = last_step
        self._early_stopping_after_steps = early_stopping_after_steps
        self._record = record
        self._clock, self._wall_clock = clock, wall_clock
        self._signals = StopSignals()
        self._tags = TagWatch(args.wandb_poll_seconds) if args.wandb_poll_seconds is not None else None
        self._deadlines = _deadlines(args, environment)
        self._started_at = 0.0
        self._cancelled_at: int | None = None
        self._loss, self._least_loss = math.nan, math.inf

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._started_at = self._clock()
        self._signals.install()
        if self._tags is not None and distributed.is_main_process():
            self._tags.start()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "train/CrossEntropyLoss" in logs:
            self._loss = logs["train/CrossEntropyLoss"]
            self._least_loss = min(self._least_loss, self._loss if math.isfinite(self._loss) else math.inf)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step = state.global_step
        if step >= self._last_step:
            return  # the run ends here anyway, with its checkpoint and its evaluation
        if self._cancelled_at is None and step % self._args.interval_steps == 0:
            self.stop_reason = self._agree(step)
            if self.stop_reason is not None:
                self._cancel(state)
                control.should_save = control.should_log = True
        if self._cancelled_at is not None:
            control.should_evaluate = False
            if step > self._cancelled_at:
                control.should_save = False
            if step >= self._cancelled_at + self._extra_steps():
                control.should_training_stop = control.should_log = True

    def wants_to_stop(self, state: TrainerState) -> bool:
        return bool(self._own_reasons(state.global_step) - {StopReason.EARLY_STOPPING})

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._signals.restore()
        if self._tags is not None:
            self._tags.stop()

    def state_dict(self) -> dict[str, Any]:
        """The least loss so far; None: there is none yet."""
        return {"least_loss": self._least_loss if math.isfinite(self._least_loss) else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        least = state["least_loss"]
        self._least_loss = math.inf if least is None else float(least)

    def on_gone_back(self, state: TrainerState, from_step: int, position: DataPosition | None) -> None:
        if self._cancelled_at is not None:  # the checkpoint is there; the extra steps count from it
            self._cancelled_at = state.global_step

    def _agree(self, step: int) -> StopReason | None:
        """The first reason that any rank has; the same on all ranks."""
        own = self._own_reasons(step)
        counts = torch.tensor([float(reason in own) for reason in StopReason])
        for reason, count in zip(StopReason, distributed.all_reduce_sum(counts).tolist(), strict=True):
            if count > 0:
                return reason
        return None

    def _own_reasons(self, step: int) -> set[StopReason]:
        reasons = {StopReason[self._signals.received.name]} if self._signals.received is not None else set()
        if not distributed.is_main_process():
            return reasons
        if os.path.exists(self._file):  # unlike Path.exists, False also while a network disk does not answer
            reasons.add(StopReason.CANCEL_FILE)
        if self._tags is not None and self._tags.found:
            reasons.add(StopReason.TRACKER_TAG)
        factor = self._args.early_stopping_factor
        if factor is not None and step > self._early_stopping_after_steps and self._loss > factor * self._least_loss:
            reasons.add(StopReason.EARLY_STOPPING)
        limit = self._args.time_limit_seconds
        if limit is not None and self._clock() - self._started_at >= limit:
            reasons.add(StopReason.TIME_LIMIT)
        reasons.update(reason for reason, moment in self._deadlines if self._wall_clock() >= moment)
        return reasons

    def _cancel(self, state: TrainerState) -> None:
        assert self.stop_reason is not None
        self._cancelled_at = state.global_step
        if not distributed.is_main_process():
            return
        more = f", then {self._extra_steps():,} more steps" if self._extra_steps() else ""
        logger.warning("Stopping at step %d (%s): a checkpoint%s.", state.global_step, self.stop_reason.words, more)
        if self._record is not None:
            self._record(state, "cancel", reason=self.stop_reason.words)
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s could not be removed (%s); remove it before the next launch.", self._file, error)

    def _extra_steps(self) -> int:
        return 0 if self.stop_reason is StopReason.EARLY_STOPPING else self._args.extra_steps


def _deadlines(args: CancellationArgs, environment: Mapping[str, str]) -> list[tuple[StopReason, float]]:
    """Moments (seconds since 1970) at which the run must begin to stop."""
    deadlines = []
    if args.deadline is not None:
        deadlines.append((StopReason.DEADLINE, moment_of(args.deadline)))
    if args.seconds_before_job_end is not None:
        job_end = environment.get("SLURM_JOB_END_TIME")
        if job_end is None:
            logger.warning(
                "callbacks.cancellation.seconds_before_job_end is set, but SLURM_JOB_END_TIME is not in the "
                "environment; use time_limit_seconds or deadline instead."
            )
        else:
            deadlines.append((StopReason.JOB_END, float(job_end) - args.seconds_before_job_end))
    return deadlines


def exit_code_of(callbacks: list[Any]) -> int:
    """What the launch should return after training: 0, or the code of the reason for which it stopped early."""
    reasons = [callback.stop_reason for callback in callbacks if isinstance(callback, Cancellation)]
    return next((reason.exit_code for reason in reasons if reason is not None), 0)
