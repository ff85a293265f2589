"""For all tests: what is drawn at random is the same at every run, so that a failure is there again tomorrow.

`HYPOTHESIS_PROFILE=search` draws anew, to look for cases nobody has seen.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tests.forks import Forks
    from tests.joined import JoinedRanks

pytest_plugins = ["tests.durations"]

settings.register_profile("repeatable", derandomize=True)
settings.register_profile("search", derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Forks"]:
    """Starts launches at once. What a launcher does, or an interpreter when it ends, is tested with real ones."""
    from tests.forks import Forks  # imports torch, which many tests need not

    starter = Forks(tmp_path_factory.mktemp("forks"))
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator["JoinedRanks"]:
    """Two ranks that run functions."""
    from tests.joined import JoinedRanks

    ranks = JoinedRanks(2, str(tmp_path_factory.mktemp("ranks")))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator["JoinedRanks"]:
    """Four ranks, for what is spread two ways."""
    from tests.joined import JoinedRanks

    ranks = JoinedRanks(4, str(tmp_path_factory.mktemp("four-ranks")))
    yield ranks
    ranks.close()
