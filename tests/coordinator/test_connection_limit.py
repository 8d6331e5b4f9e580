"""Which connections are admitted, and which ones are closed for them."""

import resource
from pathlib import Path

import pytest

from coordinator.http.connection_limit import FILES_EACH, MAX_CONNECTIONS, OWN_FILES, ConnectionLimit, connection_limit
from coordinator.settings import Settings
from coordinator.store.lease import Peer, Peers
from protocol.errors import OuterstepError


class FakeConnection:
    """A connection that only notes that it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def close_idle(self) -> None:
        self.closed = True


def admitted(limit: ConnectionLimit, address: str, count: int) -> list[FakeConnection]:
    connections = [FakeConnection() for _ in range(count)]
    assert [limit.admit(connection, address) for connection in connections] == [None] * count
    return connections


def test_each_address_has_its_own_limit() -> None:
    limit = ConnectionLimit(limit=10, per_address=3)
    mine = admitted(limit, "10.0.0.1", 3)
    for each in mine:
        limit.busy(each)
    assert "3 connections from 10.0.0.1" in str(limit.admit(FakeConnection(), "10.0.0.1"))
    admitted(limit, "10.0.0.2", 3)
    limit.remove(mine[0])
    limit.remove(mine[0])  # again, without effect
    for each in admitted(limit, "10.0.0.1", 1):
        limit.busy(each)
    assert limit.admit(FakeConnection(), "10.0.0.1") is not None
    assert len(limit) == 6


def test_at_its_limit_an_address_loses_what_it_has_left_idle_longest() -> None:
    limit = ConnectionLimit(limit=10, per_address=3)
    other = admitted(limit, "10.0.0.2", 1)
    working, first, second = admitted(limit, "10.0.0.1", 3)
    limit.busy(working)
    limit.busy(first)
    limit.idle(first)
    admitted(limit, "10.0.0.1", 1)
    assert [each.closed for each in (*other, working, first, second)] == [False, False, False, True]
    admitted(limit, "10.0.0.1", 1)
    assert first.closed
    assert len(limit) == 4


def test_one_address_never_has_more_than_half() -> None:
    assert ConnectionLimit(limit=10, per_address=512).per_address == 5


def test_proxies_and_other_coordinators_are_not_limited_per_address() -> None:
    limit = ConnectionLimit(limit=20, per_address=1, proxies="127.0.0.1, 10.1.0.0/16")
    limit.peers = Peers("a", all=[Peer("b", "http://10.0.0.2:8470", "1", 0.0, "")])
    (limited,) = admitted(limit, "10.0.0.3", 1)
    others = [each for address in ("10.1.2.3", "127.0.0.1", "10.0.0.2") for each in admitted(limit, address, 3)]
    assert not any(each.closed for each in others)
    limit.busy(limited)
    assert limit.admit(FakeConnection(), "10.0.0.3") is not None


def test_the_longest_idle_connection_is_closed_and_no_busy_one() -> None:
    limit = ConnectionLimit(limit=4, per_address=4)
    working, first, second = admitted(limit, "10.0.0.1", 2)[0:1] + admitted(limit, "10.0.0.2", 2)
    limit.busy(working)
    limit.idle(working)
    limit.busy(working)
    newcomer = FakeConnection()
    assert limit.admit(newcomer, "10.0.0.3") is None
    assert len(limit) == 4
    limit.busy(newcomer)
    admitted(limit, "10.0.0.4", 2)
    assert (working.closed, newcomer.closed, first.closed, second.closed) == (False, False, True, True)


def test_no_connection_is_admitted_while_all_are_busy() -> None:
    limit = ConnectionLimit(limit=2, per_address=1)
    connections = admitted(limit, "10.0.0.1", 1) + admitted(limit, "10.0.0.2", 1)
    for connection in connections:
        limit.busy(connection)
    assert "2 connections, the limit, have requests in progress" in str(limit.admit(FakeConnection(), "10.0.0.3"))
    assert not any(connection.closed for connection in connections)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    limit = [1024]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit[0], limit[0]))
    return limit


def test_the_limit_on_open_files_decides(files: list[int], tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert connection_limit(settings).limit == (1024 - OWN_FILES) // FILES_EACH
    files[0] = resource.RLIM_INFINITY
    assert connection_limit(settings).limit == MAX_CONNECTIONS
    files[0] = 1 << 20
    assert connection_limit(settings).limit == MAX_CONNECTIONS
    assert connection_limit(settings.model_copy(update={"max_connections": 100_000})).limit == 100_000


def test_more_than_the_limit_on_open_files_allows_is_rejected(files: list[int], tmp_path: Path) -> None:
    with pytest.raises(
        OuterstepError, match=r"MAX_CONNECTIONS = 500 needs 1256 open files, and 1024 .* set 384 at most"
    ):
        connection_limit(Settings(data_dir=tmp_path, max_connections=500))
