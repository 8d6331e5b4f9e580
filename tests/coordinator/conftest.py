"""One coordinator per file of tests, with a clock that tests move; every test has a run of its own in it."""

import itertools
import pkgutil
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import pytest

from coordinator.reporting import alerts
from coordinator.service import Coordinator
from coordinator.store.blobs import PROBE_S, Blobs
from coordinator.store.data_directory import DataDirectory
from harness import stores
from harness.coordinator import InThread, SettableClock, coordinator_thread
from harness.member import Member
from harness.patience import PATIENCE_S
from tests.coordinator.crew import crew, play_round

if TYPE_CHECKING:
    from tests.support.s3_server import S3Server

_numbers = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def _room_on_the_disk() -> Iterator[None]:
    """No alert depends on how full the disk of the machine is that runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        half_full = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(total=10**12, free=5 * 10**11))
        patch.setattr(alerts, "shutil", half_full)
        yield


# Times after which a process, a store or a transaction counts as too slow, as they are in tests.
_PATIENT: dict[str, float] = {
    "store.lease.LEASE_S": 2 * PATIENCE_S,
    "leadership.election.LEASE_S": 2 * PATIENCE_S,
    "leadership.election.FRESH_S": PATIENCE_S,
    "leadership.election.DATABASE_S": PATIENCE_S,
    "leadership.election.GIVE_WAY_S": PATIENCE_S + PROBE_S + 1.0,
    "store.blobs.STORE_S": PATIENCE_S,
    "store.postgresql.IDLE_S": int(PATIENCE_S),  # a transaction that is not going on
    "aggregation.queue.LEASE_S": 2 * PATIENCE_S,
    "aggregation.delegation.FRESH_S": PATIENCE_S,
    "aggregation.delegation.SILENT_S": PATIENCE_S,
    "store.lease.SILENT_S": PATIENCE_S,
}
_SHIPPED = {name: pkgutil.resolve_name(f"coordinator.{name}") for name in _PATIENT}


@pytest.fixture(scope="module", autouse=True)  # the simulation may run in the same process
def _nobody_is_too_slow() -> Iterator[None]:
    """Leases in a shared database expire, and coordinators, aggregators and stores count as gone, only where a test says
    so: not because the machine is busy."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _PATIENT.items():
            patch.setattr(f"coordinator.{name}", value)
        yield


@pytest.fixture
def shipped_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times that coordinators have outside of tests, for a test that moves the clock itself."""
    for name, value in _SHIPPED.items():
        monkeypatch.setattr(f"coordinator.{name}", value)


@pytest.fixture(scope="module", autouse=True)  # the simulation may run in the same process
def _one_tick_at_a_time() -> Iterator[None]:
    """A test's tick begins after the coordinator's own one has ended: so all that is due has been done when it
    returns."""
    tick, locks, choosing = Coordinator.tick, WeakKeyDictionary[Coordinator, threading.Lock](), threading.Lock()

    def tick_alone(coordinator: Coordinator) -> None:
        with choosing:
            ticking = locks.setdefault(coordinator, threading.Lock())
        with ticking:
            tick(coordinator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coordinator, "tick", tick_alone)
        yield


@pytest.fixture
def endless_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long poll that is not answered hangs, and does not look a minute later as if it had been."""
    monkeypatch.setattr("coordinator.http.long_polls.MAX_WAIT_S", 10 * PATIENCE_S)


@pytest.fixture(scope="module")
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, clock: SettableClock) -> Iterator[InThread]:
    data_dir = tmp_path_factory.mktemp("coordinator") / "data"
    with coordinator_thread(data_dir, clock=clock, requests_per_s=1e6) as running:  # by a clock that stands none pass
        yield running


@pytest.fixture(scope="module")
def member(shared: InThread) -> Member:
    """The only member of a run of one round, which is finished."""
    (member,) = crew(shared, "blobs", ["w"], rounds=1)
    play_round([member], 0)
    shared.await_state("blobs", 1)
    return member


@pytest.fixture(scope="module")
def serving() -> Iterator["S3Server"]:
    from tests.support.s3_server import s3_server

    with s3_server() as server:
        yield server


@pytest.fixture
def s3(serving: "S3Server", monkeypatch: pytest.MonkeyPatch) -> Iterator["S3Server"]:
    """An S3 server that fails as a test says, with its credentials in the environment, and few retries."""
    from outerstep.common import objects

    for name, value in serving.environment().items():
        monkeypatch.setenv(name, value)
    soon = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=1), "base": 2}
    retries = {"max_retries": 1, "retry_timeout": timedelta(seconds=5), "backoff": soon}
    monkeypatch.setattr(objects, "RETRIES", retries)
    yield serving
    serving.undisturbed()


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[Blobs]:
    """A store of blobs, of the kind that the coordinators of these tests use."""
    with closing(DataDirectory(tmp_path / "data")) as data:
        yield stores.store(data)


@pytest.fixture
def run() -> str:
    """A run name that no other test uses."""
    return f"run-{next(_numbers)}"
