"""The database's URL: where it may be, what is refused and with which words, and who may use it at the same time."""

import sqlite3
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, make_url, text
from sqlalchemy.exc import OperationalError

from coordinator.server import make_server
from coordinator.settings import Settings
from coordinator.store.database import Database, url_of
from harness.coordinator import coordinator_thread
from outerstep.cli.errors import exit_code
from outerstep.common.exit_codes import Exit
from protocol.errors import OuterstepError
from tests.coordinator.crew import crew, play_rounds

pytestmark = pytest.mark.in_sqlite

VARIABLE = "OUTERSTEP_COORDINATOR_DATABASE"


def test_without_a_url_it_is_in_the_data_directory_whatever_that_is_called(tmp_path: Path) -> None:
    """A '?' in the path once was the end of it."""
    for name in ("data", "what? 100 %", "a#b"):
        (tmp_path / name).mkdir()
        Database(url_of(None, tmp_path / name)).close()
        assert (tmp_path / name / "outerstep.db").is_file()


def test_three_slashes_are_relative_and_four_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Database(url_of("sqlite:///relative.db", tmp_path / "data")).close()
    Database(url_of(f"sqlite:///{tmp_path}/absolute.db", tmp_path / "data")).close()
    assert {path.name for path in tmp_path.iterdir() if path.suffix == ".db"} == {"relative.db", "absolute.db"}


@pytest.mark.slow
@pytest.mark.parametrize("first_page", [0, 1, 20])
def test_a_damaged_database_is_refused_with_one_sentence(tmp_path: Path, first_page: int) -> None:
    """It was a traceback of SQLAlchemy, or nothing before a request needed the page."""
    with coordinator_thread(tmp_path) as running:
        crew(running, "r", ["a"])
    file = tmp_path / "outerstep.db"
    content = bytearray(file.read_bytes())
    content[4096 * first_page :: 7] = b"\xa5" * len(content[4096 * first_page :: 7])
    file.write_bytes(content)
    with pytest.raises(OuterstepError, match=r"outerstep\.db cannot be opened: .*; restore a backup") as refused:
        Database(url_of(None, tmp_path))
    assert exit_code(refused.value) is Exit.REFUSED
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("outerstep.db", "this is not a URL; an example is sqlite:////"),
        ("", "this is not a URL"),
        ("postgresql://me:secret@host/runs", r"the driver of PostgreSQL is psycopg: write postgresql\+psycopg://"),
        ("postgresql+psycopg2://me:secret@host/runs", "the driver of PostgreSQL is psycopg"),
        ("postgresql+psycopg://me:secret@host", "names no database"),
        ("oracle://me:secret@host/runs", "oracle is not supported: use one of sqlite, postgresql"),
        ("mysql+pymysql://host/runs", "mysql is not supported"),
        ("sqlite+aiosqlite:////data/run.db", "Python's own, not aiosqlite"),
        ("sqlite://data/run.db", "three slashes before a relative path and four before an absolute one"),
        ("sqlite://", "a restart would lose a database in memory"),
        ("sqlite:///", "a restart would lose"),
        ("sqlite:///:memory:", "a restart would lose"),
        ("sqlite:///file:run?mode=memory&uri=true", "takes no SQLite options, here mode, uri"),
        ("sqlite:///file::memory:", "a restart would lose"),
    ],
)
def test_what_is_refused(url: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        url_of(url, tmp_path)
    assert "secret" not in str(refused.value)
    with pytest.raises(ValueError, match=why):
        make_server(Settings(data_dir=tmp_path / "data", database=url, port=0))
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_a_run_lives_in_a_database_elsewhere_over_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv(VARIABLE, f"sqlite:///{tmp_path}/elsewhere/run.db")
    with coordinator_thread(tmp_path / "data") as running:
        members = crew(running, "r", ["a", "b"], rounds=2, min_workers=2)
        play_rounds(running, members, [0])
        port = int(running.url.rpartition(":")[2])
    with coordinator_thread(tmp_path / "data", port) as running:
        play_rounds(running, members, [1])
        assert running.live("r").final_digest is not None
    assert not list((tmp_path / "data").glob("outerstep.db*"))


def test_two_coordinators_cannot_share_a_database_by_two_data_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would believe its own memory of the runs. A link to the file is the same file."""
    (tmp_path / "link.db").symlink_to(tmp_path / "run.db")
    monkeypatch.setenv(VARIABLE, f"sqlite:///{tmp_path}/run.db")
    with coordinator_thread(tmp_path / "a"):
        for name in ("run.db", "link.db"):
            url = f"sqlite:///{tmp_path}/{name}"
            with pytest.raises(OuterstepError, match="run.db is in use by another coordinator"):
                make_server(Settings(data_dir=tmp_path / "b", database=url, port=0))
        with pytest.raises(OuterstepError, match="in use"):
            Database(url_of(f"sqlite:///{tmp_path}/run.db", tmp_path / "b"))
    Database(url_of(f"sqlite:///{tmp_path}/run.db", tmp_path / "b")).close()


def test_a_database_that_the_data_directory_has_is_not_forgotten_by_mistake(tmp_path: Path) -> None:
    """The coordinator would begin anew, with no runs, beside all their files."""
    data = tmp_path / "data"
    data.mkdir()
    Database(url_of(None, data)).close()
    with pytest.raises(ValueError, match="the data directory already has a database"):
        url_of(f"sqlite:///{tmp_path}/other.db", data)
    same = f"sqlite:///{data}/../data/outerstep.db"
    assert url_of(same, data) == make_url(same)
    (data / "outerstep.db").rename(tmp_path / "other.db")
    Database(url_of(f"sqlite:///{tmp_path}/other.db", data)).close()


def test_a_url_that_is_forgotten_is_told_before_an_empty_database_takes_the_place_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, url = tmp_path / "data", f"sqlite:///{tmp_path}/run.db"
    monkeypatch.setenv(VARIABLE, url)
    with coordinator_thread(data) as running:
        crew(running, "r", ["a"])
    monkeypatch.delenv(VARIABLE)
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    for given, name in ((None, "outerstep"), (f"sqlite:///{tmp_path}/another.db", "another")):
        with pytest.raises(ValueError, match=rf"there is no database at .*{name}\.db"):
            make_server(Settings(data_dir=data, database=given, port=0))
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before
    assert url_of(url, data) == make_url(url)


def test_what_is_no_database_is_told_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    path.write_text("not a database, but somebody's notes\n" * 100)
    with pytest.raises(OuterstepError, match=r"notes\.db cannot be opened: file is not a database"):
        Database(url_of(f"sqlite:///{path}", tmp_path))
    assert path.read_text().startswith("not a database")
    with pytest.raises(FileNotFoundError, match="directory does not exist.*missing"):
        Database(url_of(f"sqlite:///{tmp_path}/missing/run.db", tmp_path))
    path.unlink()
    Database(url_of(f"sqlite:///{path}", tmp_path)).close()  # whoever was refused holds no lock


@pytest.mark.covers("reliability:later-database")
@pytest.mark.parametrize("schema", ["9999", "0001", "0006"])
def test_a_database_of_another_version_is_told_and_left_alone(tmp_path: Path, schema: str) -> None:
    """As where an upgrade is taken back, or from before the first release: alembic's own words name a revision, and
    nothing that helps."""
    path = tmp_path / "run.db"
    Database(url_of(f"sqlite:///{path}", tmp_path)).close()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (schema,))
    before = path.read_bytes()
    unknown = (
        rf"run\.db has schema {schema}, .* does not know: .* later one or one from before .* up to \d{{4}} .*restore"
    )
    with pytest.raises(OuterstepError, match=unknown):
        Database(url_of(f"sqlite:///{path}", tmp_path))
    assert path.read_bytes() == before


def test_a_commit_that_fails_leaves_no_transaction_open(tmp_path: Path) -> None:
    """The connection went back to the pool with it, and every later write found the database locked."""
    with closing(Database(url_of(None, tmp_path))) as database:

        def full(_: Connection) -> None:
            event.remove(database.reading, "commit", full)
            raise OperationalError("COMMIT", None, sqlite3.OperationalError("database or disk is full"))

        event.listen(database.reading, "commit", full)
        for attempt in (1, 2):
            with pytest.raises(OperationalError) if attempt == 1 else nullcontext(), database.write() as session:
                session.execute(text("INSERT INTO audit (at, act, message) VALUES (0, 'x', 'y')"))
        with sqlite3.connect(tmp_path / "outerstep.db") as other:
            assert other.execute("SELECT COUNT(*) FROM audit").fetchone() == (1,)
