"""What must hold between fields. Each check takes the whole run and yields sentences that begin with the key."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

from fsspec import available_protocols
from fsspec.utils import get_protocol

from olmo_hf.args import RunArgs
from olmo_hf.callbacks.args import callbacks_problems, rollback_problems
from olmo_hf.data.args import data_problems
from olmo_hf.errors import ConfigError
from olmo_hf.evaluation.args import evaluation_problems
from olmo_hf.model.presets import PRESETS
from olmo_hf.settings.problems import Problems, nearest, shown
from olmo_hf.training.durations import parse_duration
from olmo_hf.training.schedulers import scheduler_problems
from olmo_hf.wording import moment_of

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NOT_A_PATH = ("auto", "never")


def check_run(run: RunArgs, problems: Problems) -> None:
    """Notes every broken rule, except on values that could not even be read."""
    for check in CHECKS:
        for sentence in check(run):
            key = re.split(r":? ", sentence, maxsplit=1)[0].rstrip(":")
            if not problems.touches([key]):
                problems.add(key, sentence)


def check_name(run: RunArgs) -> Iterator[str]:
    """The name is also a directory name, on every file system and in every tracker."""
    if not run.name:
        yield "name: not given; write `name: my-run`, which also names the directory below runs/"
    elif not _PLAIN_NAME.fullmatch(run.name):
        yield (
            f"name: found {shown(run.name)}, expected a plain directory name; use letters, digits, `.`, `_` and `-`, "
            "starting with a letter or digit"
        )


def check_model(run: RunArgs) -> Iterator[str]:
    """One source says what is built."""
    model = run.model
    if model.init_from is not None and (model.preset is not None or model.config):
        yield "model.init_from: the checkpoint says the architecture; remove `model.preset` and `model.config`"
    elif model.init_from is None and model.preset is None and not model.config:
        yield "model.preset: not given; name a size such as olmo2_7b, or give `model.config` or `model.init_from`"
    if model.preset is not None and model.preset not in PRESETS:
        guess = nearest(model.preset, PRESETS)
        remedy = f"did you mean {guess!r}?" if guess else "choose one, or give `model.config`"
        yield f"model.preset: found {shown(model.preset)}, expected one of {', '.join(PRESETS)}; {remedy}"


def check_data(run: RunArgs) -> Iterator[str]:
    """There is something to train on, and every file of masks has its file of tokens."""
    if not run.data.paths and not run.data.sources and run.data.mix is None:
        yield "data.paths: not given; name the token files, for example `paths: [data/mine/train/*.npy]`"
    yield from _check_data_section("data", run.data)
    for place, evaluator in enumerate(run.evaluation.evaluators):
        yield from _check_data_section(f"evaluation.evaluators[{place}].data", evaluator.data)


def _check_data_section(key: str, data: Any) -> Iterator[str]:
    yield from data_problems(data, key)
    window = data.instance_filter
    if window is not None and not 1 <= window.repetition_min_period <= window.repetition_max_period:
        yield (
            f"{key}.instance_filter.repetition_min_period: found {window.repetition_min_period} with a longest period "
            f"of {window.repetition_max_period}; give 1 <= shortest <= longest"
        )


def check_lengths(run: RunArgs) -> Iterator[str]:
    """The run has an end, every interval is a length, and a launch has one reason to stop early."""
    training = run.training
    if training.max_duration is None:
        yield "training.max_duration: not given; write 300 (steps), '2ep' (epochs) or '5e9T' (tokens)"
    lengths = {
        "training.max_duration": training.max_duration,
        "training.logging_steps": training.logging_steps,
        "training.save_interval": training.save_interval,
        "training.save_interval_ephemeral": training.save_interval_ephemeral,
        "training.save_interval_unsharded": training.save_interval_unsharded,
        "evaluation.interval": run.evaluation.interval,
    }
    for key, value in lengths.items():
        try:
            if value is None:
                continue
            duration = parse_duration(value, key=key, minutes_allowed="save_interval" in key)
            if duration.unit == "epochs" and run.data.order == "random_offsets":
                yield f"{key}: found {shown(value)}, but `data.order: random_offsets` has no epochs; say steps"
        except ConfigError as error:
            yield error.problems[0]
    if training.stop_at is not None and training.stop_after is not None:
        yield "training.stop_after: given together with `training.stop_at`; keep one of them"


def check_batch(run: RunArgs) -> Iterator[str]:
    """The global batch is named; whether it divides among the devices is known only at launch."""
    if run.training.global_train_batch_size is None:
        yield "training.global_train_batch_size: not given; write the instances per optimizer step over all devices"


def check_resume(run: RunArgs) -> Iterator[str]:
    """What changes a restart is asked for together with the checkpoint it starts from."""
    training = run.training
    yield from _check_restored_data(run)
    if not training.resume.rpartition("://")[2]:
        yield (
            f"training.resume: found {shown(training.resume)}, which names nothing; write auto, never or the path or "
            "address of a checkpoint"
        )
    if training.resume not in _NOT_A_PATH:
        return
    for name in ("reset_optimizer", "reset_trainer_state", "fast_forward_batches", "start_epoch"):
        if getattr(training, name) not in (None, False, 0):
            yield (
                f"training.{name}: found {shown(getattr(training, name))} with `training.resume: {training.resume}`, "
                "which would repeat it at every restart; name the checkpoint in `training.resume`"
            )


def _check_restored_data(run: RunArgs) -> Iterator[str]:
    if not run.training.restore_dataloader and run.training.resume in _NOT_A_PATH:
        yield (
            f"training.restore_dataloader: found false with `training.resume: {run.training.resume}`, which would "
            "begin the data again at every restart; name the checkpoint in `training.resume`"
        )


def check_scheduler(run: RunArgs) -> Iterator[str]:
    """The curve is one; fields of one curve are not given to another."""
    curve = run.training.scheduler
    yield from scheduler_problems(curve, peak_lr=run.training.learning_rate, max_=_length_in(curve.units, run))


def _length_in(units: str, run: RunArgs) -> int | None:
    """Length of the run in these units, where it is given in them."""
    try:
        length = parse_duration(run.training.max_duration)
    except ConfigError:
        return None  # told by `check_lengths`
    return length.amount if length.unit == units else None


def check_precision(run: RunArgs) -> Iterator[str]:
    """One kind of mixed precision, and one that the attention backend has."""
    if run.training.bf16 and run.training.fp16:
        yield "training.fp16: given together with `training.bf16`; keep one of them"
    backend = run.model.attn_implementation
    if backend.startswith("flash") and not (run.training.bf16 or run.training.fp16):
        yield (
            f"model.attn_implementation: found {shown(backend)}, which computes in half precision only, in a run in "
            "fp32; set `training.bf16: true` or choose sdpa"
        )


def check_optimizer(run: RunArgs) -> Iterator[str]:
    """`optim` chooses among Hugging Face's optimizers, `optimizer` among ours."""
    default = next(f.default for f in dataclasses.fields(run.training) if f.name == "optim")
    if run.training.optimizer != "adamw" and run.training.optim != default:
        yield f"training.optim: given together with `training.optimizer: {run.training.optimizer}`; keep one of them"
    ours = run.training.optim == default and run.training.optimizer in ("adamw", "lion")
    for key in ("selective_updates", "record_update_metrics"):
        if getattr(run.training, key) and not ours:
            name = "optimizer" if run.training.optim == default else "optim"
            yield (
                f"training.{key}: given together with `training.{name}: {getattr(run.training, name)}`, which does "
                f"not know it; only our adamw and lion do: leave `{name}` out or set `{key}: false`"
            )
    if run.training.optim.startswith("schedule_free") and run.training.scheduler.name not in _NO_DECAY:
        yield (
            f"training.scheduler.name: found {run.training.scheduler.name!r} with `training.optim: "
            f"{run.training.optim}`, which averages weights in the place of a decay; use {' or '.join(_NO_DECAY)}"
        )
    for pattern, factor in run.training.learning_rate_factors.items():
        if factor < 0:
            yield f"training.learning_rate_factors.{pattern}: found {factor:g}, expected 0 or more; raise it"


_NO_DECAY = ("constant", "constant_with_warmup")
"""Curves that stay at the peak."""

_AT_LEAST: dict[str, float] = {
    "data.sequence_length": 2,
    "data.num_workers": 0,
    "data.prefetch_factor": 1,
    "data.seed": 0,
    "data.mix_tokens": 1,
    "training.global_train_batch_size": 1,
    "training.per_device_train_batch_size": 1,
    "training.per_device_eval_batch_size": 1,
    "training.seed": 0,
    "training.learning_rate": 0,
    "training.weight_decay": 0,
    "training.adam_epsilon": 0,
    "training.max_grad_norm": 0,
    "training.max_grad_norm_ratio": 0,
    "training.z_loss_weight": 0,
    "training.bolt_on_warmup": 0,
    "training.fast_forward_batches": 0,
    "training.start_epoch": 0,
    "training.max_skipped_steps": 0,
    "training.optimizer_metrics_steps": 1,
    "training.loss_chunk_tokens": 1,
    "training.fsdp_layers_per_unit": 1,
    "training.stop_at": 1,
    "training.stop_after": 1,
    "training.scheduler.warmup": 0,
    "training.scheduler.t_max": 1,
    "training.scheduler.alpha_f": 0,
    "training.scheduler.decay": 0,
    "training.scheduler.grad_clip_warmup": 0,
    "training.scheduler.grad_clip_warmup_factor": 0,
}
"""Smallest value that makes sense; null stays allowed where the field allows it."""

_MOST_WORKERS = 1_024
"""Processes of one rank that read data; far more than any machine feeds a device with."""


def check_ranges(run: RunArgs) -> Iterator[str]:
    """Numbers on their own."""
    for key, least in _AT_LEAST.items():
        value: Any = run
        for name in key.split("."):
            value = getattr(value, name)
        if value is not None and value < least:
            yield f"{key}: found {shown(value)}, expected at least {least:g}; raise it"
    if run.data.num_workers > _MOST_WORKERS:
        yield f"data.num_workers: found {run.data.num_workers}, but each is a process of its own; lower it"
    for name in ("adam_beta1", "adam_beta2"):
        value = getattr(run.training, name)
        if not 0 <= value < 1:
            yield f"training.{name}: found {shown(value)}, expected 0 up to but not 1; lower it"
    for name in ("keep_sharded", "keep_unsharded"):
        kept = getattr(run.training, name)
        if kept != -1 and kept < 1:
            yield f"training.{name}: found {kept}, expected -1 (all) or at least 1; one must be kept to go on"


def check_sections(run: RunArgs) -> Iterator[str]:
    """Rules that the rooms keep beside their own sections."""
    yield from callbacks_problems(run.callbacks)
    cancellation = run.callbacks.cancellation
    if cancellation is not None and cancellation.deadline is not None:
        try:
            moment_of(cancellation.deadline)
        except ConfigError as error:
            yield from error.problems
    if isinstance(run.training.logging_steps, int):  # tokens are known as steps only at launch
        yield from rollback_problems(run.callbacks, run.training.logging_steps)
    if run.callbacks.model_outputs is not None and run.training.transformers.get("torch_compile"):
        yield (
            "callbacks.model_outputs: given together with `training.torch_compile`, which leaves no modules to look "
            "at; turn one of them off"
        )
    yield from evaluation_problems(run.evaluation)


def check_addresses(run: RunArgs) -> Iterator[str]:
    """Copies go to a kind of store that exists; whether it can be reached is known only at launch."""
    addresses = {"training.upload_to": run.training.upload_to}
    if run.callbacks.upload is not None and run.callbacks.upload.to:
        addresses["callbacks.upload.to"] = run.callbacks.upload.to
    for key, address in addresses.items():
        if address is None:
            continue
        if (kind := get_protocol(address)) not in available_protocols():
            yield f"{key}: found {shown(address)}, but nothing knows `{kind}://`; write s3://, gs://, hf:// or file://"
        elif not address.rpartition("://")[2].strip("/"):
            yield f"{key}: found {shown(address)}, which names no place; write the bucket or directory too"


CHECKS: tuple[Callable[[RunArgs], Iterator[str]], ...] = (
    check_name,
    check_model,
    check_data,
    check_lengths,
    check_batch,
    check_resume,
    check_scheduler,
    check_precision,
    check_optimizer,
    check_ranges,
    check_sections,
    check_addresses,
)
