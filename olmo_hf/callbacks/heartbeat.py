"""Says so when a rank makes no progress: at which step, in what, and where in the code."""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from olmo_hf.callbacks.args import HeartbeatArgs
from olmo_hf.training.callback import OlmoCallback

logger = logging.getLogger(__name__)


class Heartbeat(OlmoCallback):
    """A thread on every rank that looks whether training goes on.

    When nothing has happened for `timeout_seconds` it writes the step, the last thing that was done and the stack of
    the main thread (which names the collective it waits in) to the log and to `heartbeat/rank{R}.txt`, once per
    standstill. It ends nothing: a run that was only slow goes on.
    """

    def __init__(
        self,
        args: HeartbeatArgs,
        *,
        run_dir: Path,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._timeout_seconds = args.timeout_seconds
        self._file = run_dir / "heartbeat" / f"rank{rank}.txt"
        self._rank = rank
        self._clock = clock
        self._last: tuple[float, int, str] = (clock(), 0, "start")  # time, step, what was done
        self._told: tuple[float, int, str] | None = None
        self._main_thread = threading.main_thread().ident
        self._stop = threading.Event()

    def _beat(self, state: TrainerState, what: str) -> None:
        self._last = (self._clock(), state.global_step, what)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._main_thread = threading.get_ident()
        self._beat(state, "training began")
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._beat(state, "data of the step was read")

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._beat(state, "forward and backward of a micro-batch")

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._beat(state, "gradients were clipped")

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._beat(state, "optimizer step")

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._beat(state, "metrics were logged")

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._beat(state, "checkpoint was written")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(min(self._timeout_seconds / 4, 30.0)):
            self.check()

    def check(self) -> bool:
        """Reports a standstill that has not been reported yet; says whether there is one."""
        last = self._last
        since, step, what = last
        seconds = self._clock() - since
        if seconds < self._timeout_seconds:
            return False
        if self._told is not last:
            self._told = last
            text = (
                f"Rank {self._rank} has made no progress for {seconds:.0f} s. The last complete step is {step}; "
                f"the last thing done: {what}. Its main thread is in:\n{self._stack()}"
            )
            logger.error("%s", text)
            self._write(text)
        return True

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._main_thread) if self._main_thread is not None else None
        return "".join(traceback.format_stack(frame)) if frame is not None else "(unknown)"

    def _write(self, text: str) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        except OSError as error:
            logger.warning("%s cannot be written (%s).", self._file, error)
