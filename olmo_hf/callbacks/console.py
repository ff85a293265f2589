"""What a person at the terminal sees while it trains: one calm line of progress, evaluations, the result."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.table import Table
from transformers import TrainerControl, TrainerState, TrainingArguments

from olmo_hf.callbacks.args import ConsoleArgs
from olmo_hf.callbacks.cancellation import Cancellation
from olmo_hf.training.callback import OlmoCallback
from olmo_hf.wording import duration, short_number

_CLEAR_LINE = "\r\x1b[K"
_LEAST_COLUMNS = 60
"""A table in less would have no room for its words."""

_SHOWN: tuple[tuple[str, str], ...] = (
    ("loss", "train/CrossEntropyLoss"),
    ("z", "train/ZLoss"),
    ("grad", "optim/total_grad_norm"),
    ("lr", "optim/learning_rate_group0"),
)


_GIVEN_UP = ("z", "bar", "MFU", "grad", "lr", "tok/s")
"""What a line does without where it would not fit, first to last: loss and time left stay longest."""


def progress_parts(step: int, last_step: int, logs: Mapping[str, float]) -> dict[str, str]:
    """What is said of a logged step, by name; what is not in `logs` is left out."""
    parts = {"step": f"step {step:,}/{last_step:,}"}
    for name, key in _SHOWN:
        if key in logs:
            parts[name] = f"{name} {logs[key]:.4g}" if name != "loss" else f"{name} {logs[key]:.4f}"
    if "throughput/tokens_per_second" in logs:
        parts["tok/s"] = f"{short_number(logs['throughput/tokens_per_second'])} tok/s"
    if "throughput/device/mfu" in logs:
        parts["MFU"] = f"MFU {100 * logs['throughput/device/mfu']:.1f}%"
    if "throughput/seconds_left" in logs:
        parts["left"] = f"{duration(logs['throughput/seconds_left'])} left"
    return parts


def progress_line(step: int, last_step: int, logs: Mapping[str, float]) -> str:
    """One line for a logged step."""
    return "  ".join(progress_parts(step, last_step, logs).values())


def rewritten_line(step: int, last_step: int, logs: Mapping[str, float], width: int) -> str:
    """The same with a bar, in `width` columns at most: a line that wraps could not be rewritten."""
    parts, bar = progress_parts(step, last_step, logs), _bar(step, last_step) + " "
    for name in ("", *_GIVEN_UP):
        parts.pop(name, None)
        bar = "" if name == "bar" else bar
        line = bar + "  ".join(parts.values())
        if len(line) <= width:
            break
    return line[:width]


class Console(OlmoCallback):
    """Rank 0 only. On a terminal one line is rewritten; elsewhere (a file, CI) lines are appended, not too often.

    Args:
        last_step: step at which this launch ends. None: `state.max_steps`.
        cancellation: knows at the end why the run stopped early.
        stream: where to write.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        args: ConsoleArgs,
        *,
        last_step: int | None = None,
        cancellation: Cancellation | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._last_step = last_step
        self._cancellation = cancellation
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        in_ci = os.environ.get("CI", "") not in ("", "false", "0")
        self._bar = args.style == "bar" or (args.style == "auto" and self._stream.isatty() and not in_ci)
        self._seconds_between_lines = args.seconds_between_lines
        self._shown_at: float | None = None
        self._checkpoint_shown_at: float | None = None
        self._started_at = 0.0
        self._first = (0, 0)  # step and tokens at the start of this launch
        self._pending: str | None = None  # newest line that was not shown
        self._last_logs: dict[str, float] = {}
        self._evaluations: dict[str, float] = {}

    def _end(self, state: TrainerState) -> int:
        return state.max_steps if self._last_step is None else self._last_step

    def _print(self, line: str) -> None:
        self._stream.write((_CLEAR_LINE if self._bar else "") + line + "\n")
        self._stream.flush()

    def table(self, title: str, rows: Mapping[str, str]) -> None:
        """Prints a table of names and values."""
        table = Table(title=title, show_header=False, title_justify="left")
        table.add_column(style="dim")
        table.add_column(justify="right")
        for name, value in rows.items():
            table.add_row(name, value)
        console = RichConsole(file=self._stream, force_terminal=self._bar, highlight=False, markup=False)
        console.width = max(console.width, _LEAST_COLUMNS)
        console.print(table)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._started_at = self._clock()
        self._first = (state.global_step, state.num_input_tokens_seen)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or logs is None or "train_runtime" in logs:
            return
        evaluations = {key: value for key, value in logs.items() if key.startswith("eval/")}
        if evaluations:
            self._evaluations.update(evaluations)
            self._show_evaluations(state.global_step, evaluations)
        else:
            self._last_logs = dict(logs)
            self._progress(state)

    def _progress(self, state: TrainerState) -> None:
        if self._bar:
            width = shutil.get_terminal_size(fallback=(200, 24)).columns - 1
            line = rewritten_line(state.global_step, self._end(state), self._last_logs, width)
            self._stream.write(_CLEAR_LINE + line)
            self._stream.flush()
            return
        line = progress_line(state.global_step, self._end(state), self._last_logs)
        now = self._clock()
        due = self._shown_at is None or now - self._shown_at >= self._seconds_between_lines
        if due or state.global_step >= self._end(state):
            self._print(line)
            self._shown_at, self._pending = now, None
        else:
            self._pending = line

    def _show_evaluations(self, step: int, evaluations: Mapping[str, float]) -> None:
        values = "  ".join(f"{key.removeprefix('eval/')} {value:.4f}" for key, value in evaluations.items())
        self._print(f"evaluation at step {step:,}  {values}")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero or self._bar:
            return
        now = self._clock()
        if self._checkpoint_shown_at is None or now - self._checkpoint_shown_at >= self._seconds_between_lines:
            self._checkpoint_shown_at = now
            self._print(f"checkpoint at step {state.global_step:,}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        if self._pending is not None:
            self._print(self._pending)
        elif self._bar:
            self._print(progress_line(state.global_step, self._end(state), self._last_logs))
        self.table("Result", self.result(state))

    def result(self, state: TrainerState) -> dict[str, str]:
        """Rows of the table at the end."""
        seconds = self._clock() - self._started_at
        first_step, first_tokens = self._first
        tokens = state.num_input_tokens_seen - first_tokens
        rows = {
            "steps": f"{state.global_step:,} ({state.global_step - first_step:,} in this launch)",
            "tokens": f"{state.num_input_tokens_seen:,} ({tokens:,} in this launch)",
            "time of this launch": duration(seconds),
        }
        if seconds > 0:
            rows["tokens per second, all told"] = short_number(tokens / seconds)
        if "train/CrossEntropyLoss" in self._last_logs:
            rows["last cross-entropy"] = f"{self._last_logs['train/CrossEntropyLoss']:.4f}"
        rows.update({key: f"{value:.4f}" for key, value in self._evaluations.items()})
        if self._cancellation is not None and self._cancellation.stop_reason is not None:
            rows["stopped early"] = f"{self._cancellation.stop_reason.words}; the same command goes on"
        return rows


def _bar(step: int, last_step: int, width: int = 20) -> str:
    filled = width if last_step <= 0 else min(width * step // last_step, width)
    return "[" + "=" * filled + " " * (width - filled) + "]"
