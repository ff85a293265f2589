"""The learning rate over the run: curves as pure functions, and the clock that applies them.

`s` is the clock of the schedule (optimizer steps or tokens, 1 or one batch at the first update), `w` the length of the
warm-up, `s_max` the horizon, all in the schedule's units (spec: trainer.md section 8).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from olmo_hf.errors import ConfigError
from olmo_hf.training.args import SchedulerArgs

LearningRateCurve = Callable[[int, int], float]
"""From (steps, tokens), both including the batch being trained on, to the learning rate of its update."""


def cosine(s: float, *, peak: float, floor: float, w: float, s_max: float) -> float:
    """Half a cosine from the peak at `w` to the floor at `s_max`."""
    if s >= s_max:
        return floor
    return floor + (peak - floor) * (1 + math.cos(math.pi * (s - w) / (s_max - w))) / 2


def linear(s: float, *, peak: float, floor: float, w: float, s_max: float) -> float:
    """A straight line from the peak at `w` to the floor at `s_max`."""
    if s >= s_max:
        return floor
    return peak - (peak - floor) * ((s - w) / (s_max - w))


def inverse_sqrt(s: float, *, peak: float, w: float) -> float:
    """Peak times sqrt(w / s) from `w` on; neither floor nor horizon."""
    return peak * math.sqrt(w / max(w, s))


def cosine_linear_envelope(s: float, *, peak: float, floor: float, w: float, s_max: float) -> float:
    """The cosine above the floor, multiplied by a line that falls from 1 at `w` to 0 at `s_max`."""
    if s >= s_max:
        return floor
    r = (s - w) / (s_max - w)
    return floor + (1 - r) * (peak - floor) * (1 + math.cos(math.pi * r)) / 2


def stable_decay(s: float, *, peak: float, floor: float, s_max: float, decay: float, shape: str) -> float:
    """The peak until `decay` before `s_max`, then down to the floor (Hu et al. 2024, arXiv:2404.06395).

    Args:
        shape: `linear`, `cosine`, or `one_minus_sqrt` (Hägele et al. 2024, arXiv:2405.18392).
    """
    if s >= s_max:
        return floor
    r = (s - (s_max - decay)) / decay
    if r <= 0:
        return peak
    left = {"linear": 1 - r, "cosine": (1 + math.cos(math.pi * r)) / 2, "one_minus_sqrt": 1 - math.sqrt(r)}[shape]
    return floor + (peak - floor) * left


def learning_rate_at(args: SchedulerArgs, *, peak_lr: float, current: float, max_: float) -> float:
    """The schedule's value.

    Args:
        args: the `training.scheduler` section; must have passed `scheduler_problems`.
        peak_lr: learning rate at the end of the warm-up.
        current: clock in `args.units`, counting the batch that is being trained on.
        max_: length of the run in `args.units`; the horizon unless `args.t_max` is set.
    """
    if args.name == "constant":
        return peak_lr
    w = int(args.warmup)
    if current < w:
        start = 0.1 * peak_lr if args.warmup_min_lr is None else args.warmup_min_lr
        return start + (peak_lr - start) * current / w
    if args.name == "constant_with_warmup":
        return peak_lr
    if args.name == "inverse_sqrt_with_warmup":
        return inverse_sqrt(current, peak=peak_lr, w=w)
    s_max = max_ if args.t_max is None else args.t_max
    floor = args.alpha_f * peak_lr
    if args.name == "cosine_with_warmup":
        return cosine(current, peak=peak_lr, floor=floor, w=w, s_max=s_max)
    if args.name == "linear_with_warmup":
        return linear(current, peak=peak_lr, floor=floor, w=w, s_max=s_max)
    if args.name == "cosine_linear_envelope":
        return cosine_linear_envelope(current, peak=peak_lr, floor=floor, w=w, s_max=s_max)
    if args.name == "max_scheduler":
        cosine_value = cosine(current, peak=peak_lr, floor=floor, w=w, s_max=s_max)
        return max(cosine_value, inverse_sqrt(current, peak=peak_lr, w=w))
    assert args.name == "warmup_stable_decay", args.name
    assert args.decay is not None
    return stable_decay(current, peak=peak_lr, floor=floor, s_max=s_max, decay=args.decay, shape=args.decay_shape)


def bolt_on_warmup(inner: Callable[[float], float], *, current: float, start: float, end: float) -> float:
    """A second warm-up laid over a running schedule: 0 up to `start`, then a line that meets `inner` at `end`."""
    if current < start:
        return 0.0
    if current < end:
        return inner(end) * (current - start) / (end - start)
    return inner(current)


def learning_rate_curve(
    args: SchedulerArgs,
    *,
    peak_lr: float,
    max_steps: int,
    max_tokens: int,
    bolt_on_start: float | None = None,
    bolt_on_length: float = 0.0,
) -> LearningRateCurve:
    """Binds a schedule to a run, in whichever units it counts.

    Args:
        args: the `training.scheduler` section.
        peak_lr: learning rate at the end of the warm-up.
        max_steps: length of the run in steps.
        max_tokens: length of the run in tokens.
        bolt_on_start: clock in `args.units` at which the optimizer was reset; None is no bolt-on warm-up. In token
            units this is a number of tokens (in the original it stayed a number of steps and never took effect).
        bolt_on_length: `training.bolt_on_warmup`, in `args.units`.

    Raises:
        ConfigError: the settings make no curve.
    """
    max_ = max_steps if args.units == "steps" else max_tokens
    problems = scheduler_problems(args, peak_lr=peak_lr, max_=max_)
    if problems:
        raise ConfigError(problems)

    def inner(current: float) -> float:
        return learning_rate_at(args, peak_lr=peak_lr, current=current, max_=max_)

    def curve(step: int, tokens: int) -> float:
        current = step if args.units == "steps" else tokens
        if bolt_on_start is None or bolt_on_length == 0.0:
            return inner(current)
        return bolt_on_warmup(inner, current=current, start=bolt_on_start, end=int(bolt_on_start + bolt_on_length))

    return curve


def clip_warmup_factor(args: SchedulerArgs, current: float) -> float:
    """Factor on the clipping limits at a clock value, the last one of `grad_clip_warmup` included."""
    if args.grad_clip_warmup is None or args.grad_clip_warmup_factor is None:
        return 1.0
    return 1.0 if current > args.grad_clip_warmup else args.grad_clip_warmup_factor


def clip_factor_for_update(args: SchedulerArgs, *, completed: float) -> float:
    """Factor on the clipping limits of the next update.

    As in the original, limits follow the clock one update behind, and the very first update of a run is not warmed.
    Unlike it, the first update after a restart is no exception: the factor depends on the clock alone.

    Args:
        args: the `training.scheduler` section.
        completed: clock in `args.units` before this update; 0 at the start of the run.
    """
    return 1.0 if completed == 0 else clip_warmup_factor(args, completed)


def scheduler_problems(args: SchedulerArgs, *, peak_lr: float, max_: float | None) -> list[str]:
    """Everything that makes the section unusable, one sentence each.

    Args:
        peak_lr: `training.learning_rate`.
        max_: length of the run in `args.units`; None if not known yet.
    """
    key = "training.scheduler"
    problems = []
    warms_up = args.name != "constant"
    if args.warmup < 0:
        problems.append(f"{key}.warmup is {args.warmup}, but must not be negative: 0 is no warm-up")
    if warms_up and args.warmup_min_lr is not None and not 0 <= args.warmup_min_lr < peak_lr:
        problems.append(
            f"{key}.warmup_min_lr is {args.warmup_min_lr}, but must be at least 0 and below training.learning_rate "
            f"({peak_lr}): lower it, or leave it out for a tenth of the peak"
        )
    if args.name in ("inverse_sqrt_with_warmup", "max_scheduler") and int(args.warmup) < 1:
        problems.append(f"{key}.warmup is {args.warmup}, but {args.name} divides by it: set it to 1 or more")
    if (args.grad_clip_warmup is None) != (args.grad_clip_warmup_factor is None):
        problems.append(
            f"{key}.grad_clip_warmup is {args.grad_clip_warmup} and grad_clip_warmup_factor is "
            f"{args.grad_clip_warmup_factor}: one has no effect without the other, set both or neither"
        )
    if args.name == "warmup_stable_decay":
        problems.extend(_stable_decay_problems(args, max_))
    elif args.decay is not None:
        problems.append(f"{key}.decay is {args.decay}, but {args.name} does not use it: only warmup_stable_decay does")
    return problems


def _stable_decay_problems(args: SchedulerArgs, max_: float | None) -> list[str]:
    key = "training.scheduler"
    if args.decay is None or args.decay <= 0:
        return [f"{key}.decay is {args.decay}, but warmup_stable_decay needs the length of its decay, in {args.units}"]
    s_max = max_ if args.t_max is None else args.t_max
    if s_max is not None and args.warmup + args.decay > s_max:
        return [
            f"{key}.warmup {args.warmup} and decay {args.decay} together exceed the schedule's {s_max} {args.units}: "
            "shorten one of them"
        ]
    return []


class TokenClockLR(LRScheduler):
    """A scheduler that counts steps and tokens itself and is right under Hugging Face's order of calls.

    Identical to `LRScheduler` except that its clock starts anywhere, counts tokens too, and runs one update ahead: the
    Trainer calls `optimizer.step()` and then `scheduler.step()`, so the rate that the k-th update uses is set when the
    scheduler is made (k = 1) or stepped for the (k-1)-th time. The curve always comes from the present configuration;
    only the clock is saved. Groups may carry `lr_scale` (default 1.0): their share of the curve.

    Args:
        optimizer: its groups' `lr` are overwritten at once.
        curve: from (steps, tokens), including the batch of the update, to the learning rate.
        tokens_per_step: tokens of one global batch of this launch.
        step: updates already done.
        tokens_seen: tokens already trained on.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        curve: LearningRateCurve,
        *,
        tokens_per_step: int,
        step: int = 0,
        tokens_seen: int = 0,
    ):
        self.curve = curve
        self.tokens_per_step = tokens_per_step
        self.completed_steps = step
        self.tokens_seen = tokens_seen
        # Taken once: loading an optimizer's state later brings back the groups of the checkpoint.
        self._scales: list[float] = [group.get("lr_scale", 1.0) for group in optimizer.param_groups]
        self._used_lrs: list[float] = []
        super().__init__(optimizer)

    @property
    def last_used_lrs(self) -> list[float]:
        """Learning rate of each group in the update just done; empty before the first update of this launch."""
        return list(self._used_lrs)

    @property
    def next_lrs(self) -> list[float]:
        """Learning rate of each group in the update to come."""
        return self._scaled(self.completed_steps + 1, self.tokens_seen + self.tokens_per_step)

    def _scaled(self, step: int, tokens: int) -> list[float]:
        lr = self.curve(step, tokens)
        return [lr * scale for scale in self._scales]

    def get_lr(self) -> list[float | torch.Tensor]:
        """What `LRScheduler` writes into the groups."""
        return list(self.next_lrs)

    def step(self, epoch: int | None = None) -> None:
        """Counts the update just done and sets the rates of the next one."""
        if not self._is_initial:
            # What the groups held, not what the curve says: if something overwrote a rate, the log shows it.
            self._used_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
            self.completed_steps += 1
            self.tokens_seen += self.tokens_per_step
        super().step()

    def set_clock(self, *, step: int, tokens_seen: int) -> None:
        """Puts the clock where the run stands and writes the next update's rates into the optimizer's groups.

        Needed after the optimizer's state was loaded (which brings back the rates of the checkpoint) and where a batch
        was read without an update (an overflow in float16).
        """
        self.completed_steps = step
        self.tokens_seen = tokens_seen
        self._update_lr()

    def state_dict(self) -> dict[str, Any]:
        """The clock, as plain integers; nothing that the configuration decides."""
        return {"step": self.completed_steps, "tokens_seen": self.tokens_seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the clock over; curve, batch size and scales stay those of this launch."""
        self.set_clock(step=state_dict["step"], tokens_seen=state_dict["tokens_seen"])
