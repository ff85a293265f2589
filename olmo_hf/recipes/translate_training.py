"""Optimisation, schedule, loss, precision and length of an original configuration in our words."""

import math
from typing import Any

from olmo_hf.errors import ConfigError
from olmo_hf.recipes.ledger import Ledger
from olmo_hf.training.durations import parse_duration

Z_LOSS_EXECUTED = 1e-4
"""Weight of the z term whatever the file says: the original reads its multiplier nowhere."""

EXTRA_STEPS = 10
"""Steps the original goes on after the end when `stop_at` is not set."""

_OPTIMIZERS = {"adamw": "adamw", "lionw": "lion", "decoupled_lionw": "lion"}
_SCHEDULERS = (
    "cosine_with_warmup",
    "linear_with_warmup",
    "inverse_sqrt_with_warmup",
    "max_scheduler",
    "constant",
    "constant_with_warmup",
    "cosine_linear_envelope",
)
_COMPILED = {"mode": "torch_compile_mode", "backend": "torch_compile_backend"}


def translate_optimizer(ledger: Ledger) -> None:
    """Sets the update rule and what decays."""
    name = ledger.value("optimizer.name")
    if name not in _OPTIMIZERS:
        ledger.refuse("optimizer.name", f"expected one of {', '.join(_OPTIMIZERS)}")
    elif _OPTIMIZERS[name] == name:
        ledger.keep("optimizer.name", "training.optimizer")
    else:
        ledger.translate("optimizer.name", "training.optimizer", _OPTIMIZERS[name])
    ledger.keep("optimizer.learning_rate", "training.learning_rate")
    ledger.keep("optimizer.weight_decay", "training.weight_decay")
    betas = ledger.value("optimizer.betas")
    if isinstance(betas, list) and len(betas) == 2:
        ledger.translate("optimizer.betas", "training.adam_beta1", betas[0], f"and training.adam_beta2: {betas[1]}")
        ledger.settings["training.adam_beta2"] = betas[1]
    else:
        ledger.refuse("optimizer.betas", "expected two numbers")
    if _OPTIMIZERS.get(name) == "lion":
        ledger.no_effect("optimizer.eps", "Lion has no epsilon")
    else:
        ledger.keep("optimizer.eps", "training.adam_epsilon")
    _decay_flags(ledger)
    ledger.keep("optimizer.selective_updates", "training.selective_updates")
    ledger.keep("optimizer.record_update_metrics", "training.record_update_metrics")
    _metrics_interval(ledger)


def _decay_flags(ledger: Ledger) -> None:
    flags = ("decay_norm_and_bias", "decay_embeddings")
    older = ledger.value("optimizer.no_decay_norm_and_bias")
    if older is None:
        ledger.no_effect("optimizer.no_decay_norm_and_bias", "not set; the two newer keys decide")
        for flag in flags:
            ledger.keep(f"optimizer.{flag}", f"training.{flag}")
        return
    note = "older spelling; it decides for norms, biases and embeddings together and overrides the newer keys"
    ledger.translate("optimizer.no_decay_norm_and_bias", "training.decay_norm_and_bias", not older, note)
    ledger.settings["training.decay_embeddings"] = not older
    for flag in flags:
        ledger.no_effect(f"optimizer.{flag}", "overridden by optimizer.no_decay_norm_and_bias")


def _metrics_interval(ledger: Ledger) -> None:
    """Detailed metrics: the original collects them only when it reports to W&B."""
    key, ours = "optimizer.metrics_log_interval", "training.optimizer_metrics_steps"
    value = ledger.value(key)
    reports = any(name.startswith("wandb.") for name in ledger.given)
    if value is None and reports:
        ledger.translate(key, ours, ledger.value("wandb.log_interval"), "not set: the interval of W&B")
    elif value is not None and not reports:
        ledger.differ(key, written=f"detailed metrics every {value} steps", executed="none, because wandb is not set")
        ledger.translate(key, ours, None if ledger.executed else value)
    else:
        ledger.keep(key, ours)


def translate_scheduler(ledger: Ledger) -> None:
    """Sets the learning-rate curve and the warm-up of the clipping limit."""
    for key, known in {"name": _SCHEDULERS, "units": ("steps", "tokens")}.items():
        if ledger.value(f"scheduler.{key}") in known:
            ledger.keep(f"scheduler.{key}", f"training.scheduler.{key}")
        else:
            ledger.refuse(f"scheduler.{key}", f"expected one of {', '.join(known)}")
    for key, ours in {"t_warmup": "warmup", "t_max": "t_max"}.items():
        ledger.keep(f"scheduler.{key}", f"training.scheduler.{ours}")
    ledger.keep("scheduler.alpha_f", "training.scheduler.alpha_f")
    ledger.keep("scheduler.warmup_min_lr", "training.scheduler.warmup_min_lr")
    steps, factor = "scheduler.grad_clip_warmup_steps", "scheduler.grad_clip_warmup_factor"
    if ledger.value(steps) is None or ledger.value(factor) is None:
        for key in (steps, factor):
            ledger.no_effect(
                key, "the limit is warmed up only when length and factor are both set, as in the original"
            )
        return
    ledger.keep(steps, "training.scheduler.grad_clip_warmup")
    ledger.keep(factor, "training.scheduler.grad_clip_warmup_factor")
    ledger.differ(
        steps,
        written="the raised limit holds from the first step",
        executed="it holds from the second step to one step later",
    )
    if not ledger.executed:
        ledger.put("training.scheduler.grad_clip_warmup_lags", False, "the limit as the file says it")


def translate_clipping(ledger: Ledger) -> None:
    """Sets the limits of the gradient norm; null is off in the original, 0.0 here."""
    ratio, norm = ledger.value("max_grad_norm_ratio"), ledger.value("max_grad_norm")
    if ratio is not None:
        ledger.keep("max_grad_norm_ratio", "training.max_grad_norm_ratio")
        ledger.put("training.max_grad_norm", 0.0, "max_grad_norm_ratio goes before max_grad_norm in the original")
        ledger.no_effect("max_grad_norm", "max_grad_norm_ratio goes before it")
        return
    ledger.translate("max_grad_norm_ratio", "training.max_grad_norm_ratio", 0.0, "off")
    if norm is None:
        ledger.translate("max_grad_norm", "training.max_grad_norm", 0.0, "off")
    else:
        ledger.keep("max_grad_norm", "training.max_grad_norm")


def translate_loss(ledger: Ledger) -> None:
    """Sets z-loss and denominator."""
    asked, fused = bool(ledger.value("softmax_auxiliary_loss")), bool(ledger.value("fused_loss"))
    multiplier = ledger.value("auxiliary_loss_multiplier")
    written = multiplier if asked else 0.0
    executed = Z_LOSS_EXECUTED if asked or fused else 0.0
    if written != executed:
        ledger.differ(
            "auxiliary_loss_multiplier", written=f"z-loss of {written:g}", executed=f"z-loss of {executed:g}"
        )
    weight = executed if ledger.executed else written
    ledger.translate("softmax_auxiliary_loss", "training.z_loss_weight", weight, "")
    if asked and not ledger.executed:
        ledger.judge("auxiliary_loss_multiplier", "kept", "training.z_loss_weight", "")
    else:
        why = "the original never reads it" if ledger.executed else "softmax_auxiliary_loss is off"
        ledger.no_effect("auxiliary_loss_multiplier", why)
    if fused:
        ledger.differ(
            "fused_loss",
            written="cross-entropy is reported alone",
            executed="the reported cross-entropy holds the z term",
            taken="reported alone (always)",
        )
    ledger.no_effect("fused_loss", "all implementations agree here; training.loss_implementation picks one")
    ledger.put("training.loss_denominator", "batch_tokens", "the original divides by every token of the batch")


def translate_precision(ledger: Ledger) -> None:
    """Sets mixed precision and compilation."""
    value = ledger.value("precision")
    if value == "amp_bf16":
        ledger.translate("precision", "training.bf16", True)
    elif value == "amp_fp16":
        ledger.translate("precision", "training.fp16", True, "with loss scaling, which the original lacks")
    elif value == "fp32":
        ledger.translate("precision", "training.bf16", False)
    elif "precision" in ledger.given:
        ledger.refuse("precision", "expected amp_bf16, amp_fp16 or fp32")
    else:
        ledger.put("training.bf16", False, "precision is not set; the original would not start")
    _compile(ledger)


def _compile(ledger: Ledger) -> None:
    ledger.no_effect("compile", "off")
    block = [key for key in ledger.given if key.startswith("compile.")]
    if not block:
        return
    ledger.put("training.torch_compile", True, "the block compile is present")
    for name, ours in _COMPILED.items():
        if ledger.value(f"compile.{name}") is None:
            ledger.no_effect(f"compile.{name}", "the compiler's own default")
        else:
            ledger.keep(f"compile.{name}", f"training.{ours}")
    for name in ("fullgraph", "dynamic"):
        ledger.no_effect(f"compile.{name}", "left to Hugging Face's Trainer, which compiles the whole model")


def translate_batch(ledger: Ledger) -> None:
    """Sets batch and micro-batch."""
    ledger.keep("global_train_batch_size", "training.global_train_batch_size")
    ledger.keep("device_train_microbatch_size", "training.per_device_train_batch_size")
    ledger.keep("device_eval_batch_size", "training.per_device_eval_batch_size")
    for key in ("device_train_batch_size", "device_train_grad_accum"):
        ledger.no_effect(key, "follows from the global batch, the micro-batch and the number of devices")


def translate_length(ledger: Ledger, *, sequence_length: int) -> None:
    """Sets how long the run is; as executed, with the steps the original takes beyond the end."""
    duration, stop_at = ledger.value("max_duration"), ledger.value("stop_at")
    if ledger.value("stop_after") is not None and stop_at is not None:
        ledger.refuse("stop_after", "the original takes the earlier of stop_after and stop_at; keep one of them")
    else:
        ledger.keep("stop_after", "training.stop_after")
    try:
        end_steps = _end_in_steps(duration, ledger.value("global_train_batch_size") * sequence_length)
    except (ConfigError, TypeError) as error:
        said = "; ".join(error.problems) if isinstance(error, ConfigError) else str(error)
        ledger.refuse("max_duration", " ".join(said.split()))
        ledger.keep("stop_at", "training.stop_at")
        return
    last = _last_executed_step(end_steps, stop_at, ledger.value("stop_after"))
    if end_steps is None or last is None or last <= end_steps:
        ledger.keep("max_duration", "training.max_duration")
        ledger.keep("stop_at", "training.stop_at")
        return
    key = "max_duration" if stop_at is None else "stop_at"
    ledger.differ(
        key, written=f"ends at step {end_steps:,}", executed=f"goes on to step {last:,} at the last learning rate"
    )
    if not ledger.executed:
        ledger.keep("max_duration", "training.max_duration")
        ledger.no_effect("stop_at", f"lies behind the end of the run, step {end_steps:,}")
        return
    ledger.translate("max_duration", "training.max_duration", last, f"step {end_steps:,} and {last - end_steps} more")
    ledger.judge("stop_at", "translated", "training.max_duration", "")
    if ledger.settings.get("training.scheduler.t_max") is None:
        units = ledger.value("scheduler.units")
        horizon = end_steps if units == "steps" else _end_in_tokens(duration, end_steps, ledger, sequence_length)
        ledger.put("training.scheduler.t_max", horizon, "the curve ends where max_duration does, not at the last step")


def _end_in_steps(duration: Any, tokens_per_step: int) -> int | None:
    """Steps until `max_duration`; None for epochs, which end with the data."""
    parsed = parse_duration(duration, key="max_duration")
    if parsed.unit == "epochs":
        return None
    return parsed.amount if parsed.unit == "steps" else math.ceil(parsed.amount / tokens_per_step)


def _end_in_tokens(duration: Any, end_steps: int, ledger: Ledger, sequence_length: int) -> int:
    parsed = parse_duration(duration, key="max_duration")
    batch_tokens = int(ledger.value("global_train_batch_size")) * sequence_length
    return parsed.amount if parsed.unit == "tokens" else end_steps * batch_tokens


def _last_executed_step(end_steps: int | None, stop_at: Any, stop_after: Any) -> int | None:
    """Last step of the original; None where only the data say."""
    if end_steps is None or stop_after is not None:
        return None
    return end_steps + EXTRA_STEPS if stop_at is None else int(stop_at)
