"""Which connections come in, and who makes room for them."""

import resource
from pathlib import Path

import pytest

from coordinator.http.connection_limit import (
    FILES_EACH,
    MAX_CONNECTIONS,
    OWN_FILES,
    ConnectionLimit,
    connection_limit,
)
from coordinator.settings import Settings
from protocol.errors import OuterstepError


class Door:
    """A connection of a test's."""

    def __init__(self) -> None:
        self.closed = False

    def close_idle(self) -> None:
        self.closed = True


def entered(limit: ConnectionLimit, address: str, count: int) -> list[Door]:
    doors = [Door() for _ in range(count)]
    assert [limit.admit(door, address) for door in doors] == [None] * count
    return doors


def test_one_address_has_its_share_and_others_have_theirs() -> None:
    limit = ConnectionLimit(limit=10, per_address=3)
    mine = entered(limit, "10.0.0.1", 3)
    assert "3 connections from 10.0.0.1" in str(limit.admit(Door(), "10.0.0.1"))
    entered(limit, "10.0.0.2", 3)
    limit.remove(mine[0])
    limit.remove(mine[0])  # however often it is said
    entered(limit, "10.0.0.1", 1)
    assert limit.admit(Door(), "10.0.0.1") is not None
    assert len(limit) == 6


def test_one_address_never_has_more_than_half() -> None:
    assert ConnectionLimit(limit=10, per_address=512).per_address == 5


def test_a_proxy_has_all() -> None:
    limit = ConnectionLimit(limit=10, per_address=3, proxies="127.0.0.1, 10.1.0.0/16")
    entered(limit, "10.1.2.3", 5)
    entered(limit, "127.0.0.1", 5)


def test_who_has_rested_longest_makes_room_and_who_has_a_request_does_not() -> None:
    limit = ConnectionLimit(limit=4, per_address=4)
    working, first, second = entered(limit, "10.0.0.1", 2)[0:1] + entered(limit, "10.0.0.2", 2)
    limit.busy(working)
    limit.idle(working)
    limit.busy(working)
    newcomer = Door()
    assert limit.admit(newcomer, "10.0.0.3") is None
    assert len(limit) == 4
    limit.busy(newcomer)
    entered(limit, "10.0.0.4", 2)
    assert (working.closed, newcomer.closed, first.closed, second.closed) == (False, False, True, True)


def test_where_all_have_requests_there_is_no_room() -> None:
    limit = ConnectionLimit(limit=2, per_address=1)
    doors = entered(limit, "10.0.0.1", 1) + entered(limit, "10.0.0.2", 1)
    for door in doors:
        limit.busy(door)
    assert "2 connections are open" in str(limit.admit(Door(), "10.0.0.3"))
    assert not any(door.closed for door in doors)


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


def test_more_than_the_limit_on_open_files_carries_is_refused(files: list[int], tmp_path: Path) -> None:
    with pytest.raises(
        OuterstepError, match=r"MAX_CONNECTIONS = 500 needs 1256 open files, and 1024 .* set 384 at most"
    ):
        connection_limit(Settings(data_dir=tmp_path, max_connections=500))
