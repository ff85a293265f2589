"""Processes that train for the tests of this folder, started once."""

from collections.abc import Iterator

import pytest

from tests.forks import Forks
from tests.invariants.test_split import FSDP
from tests.served import Ranks


@pytest.fixture(scope="session")
def one(forks: Forks) -> Iterator[Ranks]:
    """One process."""
    ranks = Ranks(1, forks)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def ddp(forks: Forks) -> Iterator[Ranks]:
    """Two processes with a copy of the model each."""
    ranks = Ranks(2, forks)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def fsdp(forks: Forks) -> Iterator[Ranks]:
    """Two processes that share the model (FSDP2)."""
    ranks = Ranks(2, forks, **FSDP)
    yield ranks
    ranks.close()
