"""The heartbeat in real runs: it names the rank for which others wait, and is silent while something takes long."""

import re
from pathlib import Path

from tests.crash.test_signals import write_evaluated_run
from tests.forks import Forks


def test_a_rank_that_hangs_and_one_that_waits_for_it(forks: Forks, tmp_path: Path) -> None:
    config = write_evaluated_run(tmp_path)
    env = {"HANG_WHERE": "data", "HANG_SECONDS": "3"}
    words = ("--callbacks.heartbeat.timeout_seconds=0.8", "--training.stop_at=4")
    launch = forks.start(config, *words, ranks=2, prepare="tests.crash.hang_a_rank", **env)
    assert launch.wait() == [0, 0], "it was only slow, and goes on"
    waits, hangs = ((tmp_path / "run" / "heartbeat" / f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert "The last complete step is 2" in waits
    assert re.search(r"waits in the collective all_reduce, called at \S+/olmo_hf/distributed\.py:\d+", waits)
    assert "The last complete step is 2" in hangs
    assert "is in no collective: others may wait for it" in hangs
    assert "hang_a_rank.py" in hangs, "the stack says where"


def test_a_long_evaluation_and_a_slow_save_are_no_standstill(forks: Forks, tmp_path: Path) -> None:
    config = write_evaluated_run(tmp_path)
    words = (
        "--callbacks.heartbeat.timeout_seconds=0.8",
        "--callbacks.heartbeat.slow_timeout_seconds=3",
        "--training.stop_at=6",
    )
    # The evaluation of 42 instances in batches of 8 lasts 6 s, twice what may pass without any progress.
    env = {"HANG_WHERE": "evaluation", "HANG_SECONDS": "1"}
    launch = forks.start(config, *words, prepare="tests.crash.hang_a_rank", **env)
    assert launch.wait() == [0]
    assert not (tmp_path / "run" / "heartbeat").exists()
