"""The learning rate over the run: curves as pure functions, without torch. `token_clock.py` applies them.

`s` is the clock of the schedule (optimizer steps or tokens, 1 or one batch at the first update), `w` the length of the
warm-up, `s_max` the horizon, all in the schedule's units (spec: trainer.md section 8).
"""

import math
from collections.abc import Callable

from olmo_hf.errors import ConfigError
from olmo_hf.training.args import SchedulerArgs

HORIZONLESS = ("constant", "constant_with_warmup", "inverse_sqrt_with_warmup")
"""Curves that never come to a floor: `t_max` means nothing to them."""

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


def clip_factor_for_update(args: SchedulerArgs, *, completed: float, after: float) -> float:
    """Factor on the clipping limits of the next update.

    As in the original, limits follow the clock one update behind, and the very first update of a run is not warmed,
    unless `grad_clip_warmup_lags` is off. Unlike it, the first update after a restart is no exception: the factor
    depends on the clock alone.

    Args:
        args: the `training.scheduler` section.
        completed: clock in `args.units` before this update; 0 at the start of the run.
        after: clock after this update.
    """
    if not args.grad_clip_warmup_lags:
        return clip_warmup_factor(args, after)
    return 1.0 if completed == 0 else clip_warmup_factor(args, completed)


def scheduler_problems(args: SchedulerArgs, *, peak_lr: float, max_: float | None) -> list[str]:
    """Everything that makes the section unusable, one sentence each, beginning with the key.

    Args:
        args: the `training.scheduler` section.
        peak_lr: `training.learning_rate`.
        max_: length of the run in `args.units`; None if not known yet.
    """
    key = "training.scheduler"
    problems = [
        f"{key}.{name}: found {value:g}, but lengths are counted in whole {args.units}; write such a number"
        for name in ("warmup", "t_max", "decay", "grad_clip_warmup")
        if (value := getattr(args, name)) is not None and math.isfinite(value) and value != int(value)
    ]
    if args.warmup < 0:
        problems.append(f"{key}.warmup: found {args.warmup:g}, expected 0 (no warm-up) or more; raise it")
    if args.name != "constant" and args.warmup_min_lr is not None and not 0 <= args.warmup_min_lr < peak_lr:
        problems.append(
            f"{key}.warmup_min_lr: found {args.warmup_min_lr:g}, expected 0 or more and less than "
            f"`training.learning_rate` ({peak_lr:g}); lower it, or leave it out for a tenth of the peak"
        )
    if args.name in ("inverse_sqrt_with_warmup", "max_scheduler") and 0 <= args.warmup < 1:
        problems.append(f"{key}.warmup: found {args.warmup:g}, expected 1 or more; {args.name} divides by it")
    if (args.grad_clip_warmup is None) != (args.grad_clip_warmup_factor is None):
        missing = "grad_clip_warmup" if args.grad_clip_warmup is None else "grad_clip_warmup_factor"
        problems.append(f"{key}.{missing}: not given; the clipping warm-up needs its length and its factor")
    if args.name in HORIZONLESS and args.t_max is not None:
        problems.append(f"{key}.t_max: found {args.t_max:g}, but {args.name} has no horizon; remove it")
    if args.name == "warmup_stable_decay":
        return problems + _stable_decay_problems(args, max_)
    if args.decay is not None:
        problems.append(
            f"{key}.decay: found {args.decay:g}, but {args.name} has no final decay; remove it, or choose "
            "warmup_stable_decay"
        )
    if args.decay_shape != SchedulerArgs.decay_shape:
        problems.append(
            f"{key}.decay_shape: found {args.decay_shape!r}, but {args.name} has no final decay; remove it"
        )
    return problems


def _stable_decay_problems(args: SchedulerArgs, max_: float | None) -> list[str]:
    key = "training.scheduler.decay"
    if args.decay is None:
        return [f"{key}: not given; warmup_stable_decay needs the length of its final decay, in {args.units}"]
    if args.decay <= 0:
        return [f"{key}: found {args.decay:g}, expected the length of the final decay, in {args.units}; raise it"]
    s_max = max_ if args.t_max is None else args.t_max
    if s_max is not None and args.warmup + args.decay > s_max:
        return [
            f"{key}: found {args.decay:g}, which with a warm-up of {args.warmup:g} is longer than the schedule's "
            f"{s_max:g} {args.units}; shorten one of them"
        ]
    return []
