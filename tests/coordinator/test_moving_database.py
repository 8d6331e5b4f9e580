"""`outerstep coordinator move` of a database: from SQLite to PostgreSQL and back, with the same bucket."""

import asyncio
import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import make_url

from coordinator.backup import moving_database
from coordinator.backup.bucket import StoredBackups
from coordinator.backup.moving_database import to_postgresql, to_sqlite
from coordinator.backup.restore import restore
from coordinator.server import make_server
from coordinator.settings import Settings
from coordinator.store import sqlite
from harness.coordinator import InThread, coordinator_thread
from harness.member import Member
from harness.postgres import PostgreSQL
from harness.seaweedfs import SeaweedFS
from outerstep.common.objects import Objects
from protocol.errors import OuterstepError
from tests.coordinator.crew import crew, info, play_round

pytestmark = pytest.mark.in_sqlite

_numbers = itertools.count()


@pytest.fixture
def blobs(store: SeaweedFS) -> str:
    return store.url(f"moving-database/{next(_numbers)}")


@pytest.fixture
def database(postgres: PostgreSQL) -> str:
    return postgres.create(f"moved{next(_numbers)}")


def begin(running: InThread) -> list[Member]:
    members = crew(running, "r", ["a", "b"], rounds=9, min_workers=2, members="lease_s = 3600")
    play_round(members, 0)
    running.await_state("r", 1)
    members[0].assignment(1)
    members[1].assignment(1)
    members[0].take_part(1)
    return members


def finish_round_1(running: InThread, members: list[Member]) -> None:
    for member in members:
        member.http = running.client(str(member.http.headers["Authorization"]).removeprefix("Bearer "))
    assert info(running, "r", "/rounds/current")["fragments"][0]["contributors"] == ["a"]
    members[1].take_part(1)
    for member in members:
        member.step(1)
    running.await_state("r", 2)


def test_to_postgresql_and_back_in_the_middle_of_a_round(tmp_path: Path, blobs: str, database: str) -> None:
    data, url = tmp_path / "data", make_url(database)
    with coordinator_thread(data, blobs=blobs) as running:
        members = begin(running)
        with pytest.raises(OuterstepError, match="in use by another coordinator"):
            to_postgresql(data, url)
    assert to_postgresql(data, url) > 20
    for text in (None, f"sqlite:///{data}/outerstep.db"):
        with pytest.raises((ValueError, OuterstepError), match="was moved to PostgreSQL|no database|belongs to"):
            make_server(Settings(data_dir=data, blobs=blobs, database=text, port=0))
    with coordinator_thread(data, blobs=blobs, database=database) as running:
        finish_round_1(running, members)
        with pytest.raises(OuterstepError, match=r"the coordinator at http://127\.0\.0\.1:\d+ leads: stop all"):
            to_sqlite(tmp_path / "new", url)
        for member in members:
            member.assignment(2)
    assert to_sqlite(tmp_path / "new", url) > 20
    assert refusal(tmp_path / "other", blobs, database) == "belongs to the coordinator of another database"
    with coordinator_thread(tmp_path / "new", blobs=blobs, token_in=data) as running:
        for member in members:
            member.http = running.client(str(member.http.headers["Authorization"]).removeprefix("Bearer "))
            member.take_part(2)
        for member in members:
            member.step(2)
        running.await_state("r", 3)


def refusal(data: Path, blobs: str, database: str) -> str:
    """Return why a coordinator does not start."""
    server, listening = make_server(Settings(data_dir=data, blobs=blobs, database=database, port=0))
    asyncio.run(server.serve(sockets=[listening]))
    found = re.search("belongs to the coordinator of another database", str(server.failure))
    return found[0] if found else str(server.failure)


STEPS = ["_fill", "_pass_bucket_on", "_retire"]


@pytest.mark.covers("reliability:moved-database")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.nightly), "after"])
def test_a_move_that_is_interrupted_goes_on(
    tmp_path: Path, blobs: str, database: str, monkeypatch: pytest.MonkeyPatch, step: str, when: str
) -> None:
    """The coordinator may run in between, on the database that has the bucket."""
    data, url = tmp_path / "data", make_url(database)
    with coordinator_thread(data, blobs=blobs) as running:
        members = begin(running)
    real: Callable[..., object] = getattr(moving_database, step)

    def killed(*arguments: object) -> object:
        if when == "after":
            real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(moving_database, step, killed)
        with pytest.raises(KeyboardInterrupt):
            to_postgresql(data, url)
    moved = (step, when) in {("_pass_bucket_on", "after"), ("_retire", "before"), ("_retire", "after")}
    place, now = (tmp_path / "x", database) if moved else (data, None)
    with coordinator_thread(place, blobs=blobs, token_in=data, database=now) as running:
        finish_round_1(running, members)
    to_postgresql(data, url)
    assert not (data / sqlite.FILE).exists()
    with coordinator_thread(tmp_path / "y", blobs=blobs, token_in=data, database=database) as running:
        assert info(running, "r")["round"] == 2
        assert not (data / moving_database.JOURNAL).exists()


def test_what_is_refused(tmp_path: Path, blobs: str, database: str) -> None:
    url = make_url(database)
    with pytest.raises(OuterstepError, match="has no database: give another --data"):
        to_postgresql(tmp_path / "none", url)
    with coordinator_thread(tmp_path / "files"):
        pass
    with pytest.raises(OuterstepError, match="first move them to a bucket"):
        to_postgresql(tmp_path / "files", url)
    with pytest.raises(OuterstepError, match="no coordinator has used the database"):
        to_sqlite(tmp_path / "new", url)
    with coordinator_thread(tmp_path / "shared", blobs=f"{blobs}-shared", database=database) as running:
        begin(running)
    with coordinator_thread(tmp_path / "own", blobs=blobs):
        pass
    with pytest.raises(OuterstepError, match="is in use already, it has"):
        to_postgresql(tmp_path / "own", url)


def test_a_backup_of_a_shared_database_is_restored_to_sqlite(tmp_path: Path, blobs: str, database: str) -> None:
    """As when the database server is lost: the bucket alone is enough."""
    with coordinator_thread(tmp_path / "a", blobs=blobs, database=database) as running:
        members = crew(running, "r", ["a", "b"], rounds=9, min_workers=2, checkpoints="every_rounds = 1")
        play_round(members, 0)
        running.await_state("r", 1)
        backups = running.coordinator.backups
        assert backups is not None
    manifest = restore(StoredBackups.of(Objects(blobs)), None, tmp_path / "b")
    assert [(run.name, run.round) for run in manifest.runs] == [("r", 1)]
    assert refusal(tmp_path / "c", blobs, database) == "belongs to the coordinator of another database"
    with coordinator_thread(tmp_path / "b", blobs=blobs, token_in=tmp_path / "a") as running:
        assert info(running, "r")["round"] == 1
