"""Says so when a rank makes no progress: at which step, in what, in which collective, and where in the code."""

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from olmo_hf.callbacks.args import HeartbeatArgs
from olmo_hf.training.callback import OlmoCallback

logger = logging.getLogger(__name__)

COLLECTIVES = frozenset(
    {
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce_scatter"),
        *("reduce_scatter_tensor", "broadcast", "broadcast_object_list", "barrier", "monitored_barrier", "reduce"),
        *("gather", "gather_object", "scatter", "scatter_object_list", "all_to_all", "all_to_all_single"),
        *("send", "recv", "batch_isend_irecv"),
    }
)
"""Functions of `torch.distributed` in which a process waits for others."""


def collective_of(frame: FrameType | None) -> str | None:
    """The outermost collective of `torch.distributed` on a stack, with the place that called it; None: there is none.

    The backward pass runs below Python, so that of it only `backward` is known: under DDP and FSDP gradients are
    reduced in it.
    """
    found: str | None = None
    inside: str | None = None  # a collective whose caller outside of torch.distributed has not come yet
    while frame is not None:
        path, name = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
        if "/torch/distributed/" in path:
            inside = name if name in COLLECTIVES else inside
        elif inside is not None:
            found, inside = f"the collective {inside}, called at {path}:{frame.f_lineno}", None
        elif found is None and path.endswith("/torch/autograd/graph.py") and name == "_engine_run_backward":
            found = "the backward pass, in which gradients are reduced"
        frame = frame.f_back
    return found


class Heartbeat(OlmoCallback):
    """A thread on every rank that looks whether training goes on.

    When nothing has happened for `timeout_seconds` it writes the step, the last thing that was done, the collective in
    which the rank waits and the stack of the main thread to the log and to `heartbeat/rank{R}.txt`, once per
    standstill. Where some ranks wait in a collective and one is somewhere else, that one is what they wait for. It
    ends nothing: a run that was only slow goes on. Before the first step has ended, in an evaluation and in a save
    `slow_timeout_seconds` count instead; every forward pass of an evaluation is progress.
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
        self._slow_timeout_seconds = max(args.slow_timeout_seconds, args.timeout_seconds)
        self._file = run_dir / "heartbeat" / f"rank{rank}.txt"
        self._rank = rank
        self._clock = clock
        # Replaced as a whole, since another thread reads it: time, step, what was done, seconds it may last.
        self._last: tuple[float, int, str, float] = (clock(), 0, "start", self._slow_timeout_seconds)
        self._told: tuple[float, int, str, float] | None = None
        self._main_thread = threading.main_thread().ident
        self._stop = threading.Event()
        self._stepped = False

    def _beat(self, state: TrainerState, what: str, *, slow: bool = False) -> None:
        may_last = self._slow_timeout_seconds if slow or not self._stepped else self._timeout_seconds
        self._last = (self._clock(), state.global_step, what, may_last)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._main_thread = threading.get_ident()
        self._stepped = False
        self._beat(state, "training began")
        self._stop = threading.Event()
        threading.Thread(target=self._watch, args=(self._stop,), name="heartbeat", daemon=True).start()

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._beat(state, "data of the step was read")

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._beat(state, "forward and backward of a micro-batch")

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._beat(state, "gradients were clipped")

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._stepped = True
        self._beat(state, "optimizer step")

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._beat(state, "metrics were logged")

    def on_long_work(self, state: TrainerState, what: str) -> None:
        self._beat(state, f"{what} under way", slow=True)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._beat(state, "evaluation is over")

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._beat(state, "checkpoint was written")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._stop.set()

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(min(self._timeout_seconds / 4, 30.0)):
            self.check()

    def check(self) -> bool:
        """Reports a standstill that has not been reported yet; says whether there is one."""
        last = self._last
        since, step, what, may_last = last
        seconds = self._clock() - since
        if seconds < may_last:
            return False
        if self._told is not last:
            self._told = last
            frame = sys._current_frames().get(self._main_thread) if self._main_thread is not None else None
            collective = collective_of(frame)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else "(unknown)"
            where = (
                f"waits in {collective}" if collective is not None else "is in no collective: others may wait for it"
            )
            text = (
                f"Rank {self._rank} has made no progress for {seconds:.0f} s. The last complete step is {step}; "
                f"the last thing done: {what}. It {where}. Its main thread is in:\n{stack}"
            )
            logger.error("%s", text)
            self._write(text)
        return True

    def _write(self, text: str) -> None:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with open(self._file, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        except OSError as error:
            logger.warning("%s cannot be written (%s).", self._file, error)
