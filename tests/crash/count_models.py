"""Importing this prints, whenever a launch builds a model, how many earlier ones of this process are still alive."""

import sys
import weakref
from typing import Any

import train_hf

build, built = train_hf.build_model, []


def counted(*args: Any, **kwargs: Any) -> Any:
    """Instead of `build_model`."""
    alive = sum(reference() is not None for reference in built)
    sys.stderr.write(f"models built before: {len(built)}, alive: {alive}\n")
    model = build(*args, **kwargs)
    built.append(weakref.ref(model))
    return model


train_hf.build_model = counted
