"""One coordinator per file of tests, with a clock that tests move; every test has a run of its own in it."""

import itertools
from collections.abc import Iterator

import pytest

from harness.coordinator import InThread, SettableClock, coordinator_thread

_numbers = itertools.count()


@pytest.fixture(scope="module")
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, clock: SettableClock) -> Iterator[InThread]:
    with coordinator_thread(tmp_path_factory.mktemp("coordinator") / "data", clock=clock) as running:
        yield running


@pytest.fixture
def run() -> str:
    """A run name that no other test uses."""
    return f"run-{next(_numbers)}"
