"""Hugging Face's trackers (`report_to`), made to go on under one run, keep our names, and never end training."""

import functools
import logging
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import integration_utils

from olmo_hf import distributed

logger = logging.getLogger(__name__)

TRACKER_ID_FILE = "tracker_run_id"
_MAX_FAILURES = 3

_INIT_SECONDS, _FINISH_SECONDS = 30, 60
"""How long W&B may hold up the start and the end of a launch when its server does not answer."""

_RewriteLogs = Callable[[dict[str, Any]], dict[str, Any]]


def prepare_trackers(run_dir: Path) -> None:
    """Tells the trackers where they write and which run they continue; what the environment says already counts.

    A restarted run goes on under the same id (kept in `tracker_run_id` of the run directory), and metrics keep the
    names they have in `metrics.jsonl`. A server of W&B that does not answer holds up the start by half a minute
    and the end by a minute at most; what it did not get lies below the run directory, for `wandb sync`. Call it before
    the trainer is made.
    """
    os.environ.setdefault("WANDB_DIR", str(run_dir.absolute()))
    os.environ.setdefault("WANDB_INIT_TIMEOUT", str(_INIT_SECONDS))
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", str(_FINISH_SECONDS))
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(run_dir / "tensorboard"))
    if distributed.is_main_process() and "WANDB_RUN_ID" not in os.environ:
        os.environ["WANDB_RUN_ID"] = _tracker_id(run_dir)
        os.environ.setdefault("WANDB_RESUME", "allow")
    if not isinstance(integration_utils.rewrite_logs, _KeepNames):
        integration_utils.rewrite_logs = _KeepNames(integration_utils.rewrite_logs)


def _tracker_id(run_dir: Path) -> str:
    path = run_dir / TRACKER_ID_FILE
    try:
        if path.is_file():
            return path.read_text(encoding="utf-8").strip()
        run_id = secrets.token_hex(4)
        run_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(run_id + "\n", encoding="utf-8")
        return run_id
    except OSError as error:
        logger.warning("%s cannot be used (%s); a restart will be a new run for the trackers.", path, error)
        return secrets.token_hex(4)


class _KeepNames:
    """Trackers put `train/` before every name. Ours say already where they belong (`optim/total_grad_norm`)."""

    def __init__(self, original: _RewriteLogs):
        self._original = original

    def __call__(self, logs: dict[str, Any]) -> dict[str, Any]:
        renamed: dict[str, Any] = {}
        for name, value in logs.items():
            renamed.update({name: value} if "/" in name else self._original({name: value}))
        return renamed


def shield_trackers(callbacks: Iterable[TrainerCallback]) -> None:
    """Makes the trackers among `callbacks` unable to end training: what they raise becomes a warning.

    A tracker that cannot begin, or fails three times in a row, is left alone for the rest of this launch.
    """
    for callback in callbacks:
        if type(callback).__module__.startswith("transformers.integrations"):
            shield = _Shield(type(callback).__name__)
            for name in dir(TrainerCallback):
                if name.startswith("on_") and getattr(type(callback), name) is not getattr(TrainerCallback, name):
                    setattr(callback, name, shield.around(getattr(callback, name), begins=name == "on_train_begin"))


class _Shield:
    def __init__(self, name: str):
        self._name = name
        self._failures = 0

    def around(self, hook: Callable[..., Any], *, begins: bool) -> Callable[..., None]:
        """`hook`, but without its exceptions."""

        @functools.wraps(hook)
        def guarded(*args: Any, **kwargs: Any) -> None:
            if self._failures >= _MAX_FAILURES:
                return
            try:
                hook(*args, **kwargs)
                self._failures = 0
            except Exception as error:
                self._failures = _MAX_FAILURES if begins else self._failures + 1
                over = self._failures >= _MAX_FAILURES
                logger.warning(
                    "%s failed (%s: %s). Training goes on%s; metrics.jsonl has everything.",
                    self._name,
                    type(error).__name__,
                    error,
                    ", without it" if over else "",
                )

        return guarded
