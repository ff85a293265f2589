import gc
import weakref

from olmo_hf.callbacks.args import GarbageCollectorArgs
from olmo_hf.callbacks.garbage_collector import GarbageCollector


class Node:
    pass


def cycle() -> weakref.ref:
    node = Node()
    node.self = node
    return weakref.ref(node)


def test_collects_at_its_steps_and_gives_the_collector_back(arguments, state, control) -> None:
    callback = GarbageCollector(GarbageCollectorArgs(interval_steps=2))
    assert gc.isenabled()
    gc.collect()
    try:
        callback.on_train_begin(arguments, state, control)
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        dead = cycle()
        state.global_step = 1
        callback.on_step_end(arguments, state, control)
        assert dead() is not None
        state.global_step = 2
        callback.on_step_end(arguments, state, control)
        assert dead() is None
        old = cycle()
        gc.collect(0), gc.collect(1)
        dead = cycle()
        callback.on_save(arguments, state, control)
        assert dead() is None
        assert old() is None
    finally:
        callback.on_train_end(arguments, state, control)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_collector_that_was_off_stays_off(arguments, state, control) -> None:
    gc.disable()
    try:
        callback = GarbageCollector(GarbageCollectorArgs())
        callback.on_train_begin(arguments, state, control)
        callback.on_train_end(arguments, state, control)
        assert not gc.isenabled()
    finally:
        gc.enable()
