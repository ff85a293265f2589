"""Importing this makes the process send itself SIGTERM at a moment of a run that `SIGNAL_AT` names, once.

The time is noted in the file `SIGNALLED`. `SIGNAL_TIMES` is how often, four seconds apart.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import train_hf
from olmo_hf.evaluation.perplexity import PerplexityEvaluator
from olmo_hf.training import checkpoints
from olmo_hf.training.trainer import OlmoTrainer

MOMENTS: dict[str, tuple[Any, str]] = {
    "dataset": (train_hf, "build_train_data"),
    "first-batch": (OlmoTrainer, "get_batch_samples"),
    "evaluation": (PerplexityEvaluator, "evaluate"),
    "save": (checkpoints, "_write_rest"),
    "last-save": (checkpoints, "_write_rest"),
    "after-the-last-step": (OlmoTrainer, "_finalize_training"),
}
done: list[str] = []


def send() -> None:
    """The signal, and a note of when."""
    Path(os.environ["SIGNALLED"]).write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGTERM)


def at(moment: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the signal before it."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        step = getattr(args[-1], "step", None) if args else None  # of what is written
        due = {"save": step == 6, "last-save": step == 12}.get(moment, True)
        if due and not done:
            done.append(moment)
            send()
            if os.environ.get("SIGNAL_TIMES") == "2":
                threading.Timer(4.0, send).start()
                time.sleep(60)
        return original(*args, **kwargs)

    return wrapped


home, name = MOMENTS[os.environ["SIGNAL_AT"]]
setattr(home, name, at(os.environ["SIGNAL_AT"], getattr(home, name)))
