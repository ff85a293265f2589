"""What must survive a restart besides tensors: counters, data position, random states, callback states."""

import base64
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from olmo_hf.data.order import DataPosition
from olmo_hf.errors import CheckpointError
from olmo_hf.training.commit import write_json

RUN_STATE = "run_state.json"


@dataclasses.dataclass(kw_only=True)
class RunState:
    """Where a run stands, and what it is, as far as a restart must know."""

    step: int = 0
    tokens: int = 0
    """Tokens of all ranks that went into the model so far."""

    position: DataPosition = dataclasses.field(default_factory=DataPosition)
    world_size: int = 1
    identity: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What may not change unasked between launches: architecture, data, order (`compare_identity`)."""

    bolt_on_start: dict[str, int] | None = None
    """Steps and tokens at which a second warm-up began (`bolt_on_warmup`); None: there was none."""

    scaler: dict[str, Any] | None = None
    """State of the loss scaler in float16."""

    callbacks: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """Class name -> one state per callback of that class, in order."""


def save_run_state(state: RunState, directory: Path) -> None:
    """Write `run_state.json`."""
    write_json(directory / RUN_STATE, dataclasses.asdict(state))


def load_run_state(directory: Path) -> RunState:
    """Read `run_state.json`.

    Raises:
        CheckpointError: missing or not one of ours.
    """
    path = directory / RUN_STATE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        state = RunState(**{**fields, "position": DataPosition(**fields["position"])})
        _check_types(state)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path}: not the state of a run ({error}); choose another checkpoint") from error
    return state


def _check_types(state: RunState) -> None:
    """Raises TypeError where a field holds something of another kind, as after an edit by hand."""
    counters = {
        "step": state.step,
        "tokens": state.tokens,
        "world_size": state.world_size,
        "position.epoch": state.position.epoch,
        "position.instances": state.position.instances,
        **(state.bolt_on_start or {}),
    }
    for name, value in counters.items():
        if type(value) is not int or value < 0:
            raise TypeError(f"{name} is no counter")
    if not isinstance(state.identity, dict) or not isinstance(state.scaler, dict | None):
        raise TypeError("identity or scaler is no mapping")
    lists = state.callbacks.values() if isinstance(state.callbacks, dict) else [None]
    if not all(isinstance(one, list) and all(isinstance(each, dict) for each in one) for one in lists):
        raise TypeError("callbacks holds no lists of states")


def compare_identity(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Differences between the run of a checkpoint and the run being launched, one sentence each."""

    def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix: value}
        return {
            k: v
            for key, inner in value.items()
            for k, v in flatten(inner, f"{prefix}.{key}" if prefix else key).items()
        }

    old, new = flatten(saved), flatten(json.loads(json.dumps(current)))
    return [
        f"{key} was {old.get(key, 'not set')!r} and is now {new.get(key, 'not set')!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]


def _encode(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.cpu().numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def rng_file(rank: int) -> str:
    """Name of the file with a rank's random states."""
    return f"rng_state_{rank}.json"


def random_states() -> dict[str, Any]:
    """This process's random states (python, numpy, torch, device), as JSON can hold them."""
    algorithm, keys, place, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [algorithm, np.asarray(keys).tolist(), int(place), int(has_gauss), float(gauss)],
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def load_rng_state(directory: Path, rank: int) -> bool:
    """Put this rank's random states back; False when the checkpoint has none for this rank.

    Raises:
        CheckpointError: the file holds something else.
    """
    path = directory / rng_file(rank)
    if not path.is_file():
        return False
    try:
        _put_back(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, KeyError, OverflowError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not random states ({error}); choose another checkpoint") from error
    return True


def _put_back(state: dict[str, Any]) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    algorithm, numpy_keys, place, has_gauss, numpy_gauss = state["numpy"]
    np.random.set_state((algorithm, np.array(numpy_keys, dtype=np.uint32), place, has_gauss, numpy_gauss))
    torch.set_rng_state(_decode(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))
