"""Failing together, and agreeing in threads of their own."""

import threading
from typing import Any

import pytest

from olmo_hf.distributed import agreement_among, broadcast_object, gather_objects, new_cpu_group, run_on_all
from olmo_hf.errors import CheckpointError


def fail_on_rank_1(rank: int) -> Any:
    def action() -> int:
        if rank == 1:
            raise OSError("no disk here")
        return rank

    try:
        run_on_all(action, lambda messages: CheckpointError("; ".join(messages)))
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


def test_when_one_fails_all_raise(two_ranks: Any) -> None:
    assert two_ranks(fail_on_rank_1) == ["rank 1: no disk here"] * 2


def talk_in_a_thread(rank: int) -> Any:
    """A second group talks in a thread while the first talks in the main one, in another order."""
    group, agree, found = new_cpu_group(), agreement_among([0, 1]), []
    assert agree is not None

    def talk() -> None:
        found.extend([gather_objects(f"thread {rank}", group), broadcast_object(rank + 5, group)])
        found.extend([agree(True), agree(rank == 0)])

    thread = threading.Thread(target=talk)
    thread.start()
    main = [gather_objects(rank) for _ in range(20)]
    thread.join()
    return [found, main[-1]]


def test_two_groups_do_not_mix(two_ranks: Any) -> None:
    expected = [[["thread 0", "thread 1"], 5, True, False], [0, 1]]
    assert two_ranks(talk_in_a_thread) == [expected, expected]


def test_alone_there_is_nobody_to_agree_with() -> None:
    assert agreement_among([0]) is None
    assert new_cpu_group() is None
    assert run_on_all(lambda: 3, lambda messages: CheckpointError(messages[0])) == 3
    with pytest.raises(CheckpointError, match="broken"):
        run_on_all(lambda: (_ for _ in ()).throw(OSError("broken")), lambda messages: CheckpointError(messages[0]))
