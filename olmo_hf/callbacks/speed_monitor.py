"""Throughput, utilisation, where the time goes, and how long it will still take."""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments

from olmo_hf.callbacks.args import SpeedMonitorArgs
from olmo_hf.callbacks.peak_flops import device_peak_flops
from olmo_hf.data.order import DataPosition
from olmo_hf.training.callback import OlmoCallback

logger = logging.getLogger(__name__)

PHASES = ("data", "forward_backward", "optimizer", "logging", "evaluation", "checkpoint")
_NOT_TRAINING = ("evaluation", "checkpoint")


class SpeedMonitor(OlmoCallback):
    """Rates over a window of steps, from the host's clock.

    Every hook closes a phase: the time since the hook before it belongs to that phase. A step lasts from the end of
    the step before it to its own end, less evaluations and checkpoints in between. The first step of the process
    (compilation, warm caches, workers that start) is left out of the rates.

    Args:
        flops_per_token: model FLOPs per token, forward and backward. None: no MFU.
        last_step: step at which this launch ends, for the time left. None: `state.max_steps`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        args: SpeedMonitorArgs,
        *,
        flops_per_token: int | None,
        last_step: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._flops_per_token = flops_per_token
        self._peak_flops = args.peak_flops
        self._last_step = last_step
        self._clock = clock
        self._window: deque[tuple[float, int]] = deque(maxlen=args.window_size)  # seconds, tokens of one step
        self._phase_seconds = dict.fromkeys(PHASES, 0.0)  # since the last logged step
        self._step_seconds = 0.0  # of the step in progress, without evaluations and checkpoints
        self._mark: float | None = None
        self._tokens_at_step_end: int | None = None  # None: no step of this process has ended
        self._world_size = 1

    def _close(self, phase: str) -> None:
        now = self._clock()
        if self._mark is not None:
            seconds = now - self._mark
            self._phase_seconds[phase] += seconds
            if phase not in _NOT_TRAINING:
                self._step_seconds += seconds
        self._mark = now

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._world_size = args.world_size
        if self._flops_per_token is not None and self._peak_flops is None:
            self._peak_flops = device_peak_flops(args.device.type)
            if self._peak_flops is None:
                logger.warning(
                    "The peak of this device is not known, so MFU is not reported; "
                    "set callbacks.speed_monitor.peak_flops to its dense bfloat16 FLOPs per second."
                )
        self._mark = self._clock()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._close("data")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._close("forward_backward")

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._close("optimizer")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._close("optimizer")
        if self._tokens_at_step_end is not None:
            self._window.append((self._step_seconds, state.num_input_tokens_seen - self._tokens_at_step_end))
        self._tokens_at_step_end = state.num_input_tokens_seen
        self._step_seconds = 0.0

    def on_gone_back(self, state: TrainerState, from_step: int, position: DataPosition | None) -> None:
        if position is not None:
            self._tokens_at_step_end = None  # the tokens of the next step cannot be told from the difference

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        # An evaluation is logged when it is over: what came before that log is the evaluation.
        is_evaluation = logs is not None and any(key.startswith("eval") for key in logs)
        self._close("evaluation" if is_evaluation else "logging")

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._close("evaluation")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close("checkpoint")

    def collect_metrics(self, state: TrainerState) -> dict[str, float]:
        """Names as the original OLMo trainer where it has them; nothing but totals before the second step."""
        metrics: dict[str, float] = {"throughput/total_tokens": state.num_input_tokens_seen}
        if self._flops_per_token is not None:
            metrics["throughput/total_training_Gflops"] = self._flops_per_token * state.num_input_tokens_seen / 1e9
        seconds = sum(step_seconds for step_seconds, _ in self._window)
        if seconds > 0:
            metrics.update(self._rates(state, seconds))
        total_seconds = sum(self._phase_seconds.values())
        if total_seconds > 0:
            for phase, phase_seconds in self._phase_seconds.items():
                metrics[f"throughput/time_share/{phase}"] = phase_seconds / total_seconds
        self._phase_seconds = dict.fromkeys(PHASES, 0.0)
        return metrics

    def _rates(self, state: TrainerState, seconds: float) -> dict[str, float]:
        tokens_per_second = sum(tokens for _, tokens in self._window) / seconds
        steps_per_second = len(self._window) / seconds
        last_step = state.max_steps if self._last_step is None else self._last_step
        rates = {
            "throughput/tokens_per_second": tokens_per_second,
            "throughput/device/tokens_per_second": tokens_per_second / self._world_size,
            "throughput/device/batches_per_second": steps_per_second,
            "throughput/seconds_left": max(last_step - state.global_step, 0) / steps_per_second,
        }
        if self._flops_per_token is not None and self._peak_flops is not None:
            flops_per_second = self._flops_per_token * tokens_per_second / self._world_size
            rates["throughput/device/model_flops_per_second"] = flops_per_second
            rates["throughput/device/mfu"] = flops_per_second / self._peak_flops
        return rates
