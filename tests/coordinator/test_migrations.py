"""The migrations make exactly the tables, and the tables keep their promises."""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext

import migrations
from coordinator.store import sqlite
from coordinator.store.database import VIOLATIONS, Database, disk_is_full, fault_of
from coordinator.store.tables import Base
from protocol.errors import Problem
from protocol.messages import Cause


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with closing(Database(sqlite.url_in(tmp_path))) as database:
        yield database


@pytest.fixture
def engine(tmp_path: Path, database: Database) -> Iterator[sa.Engine]:
    engine = sa.create_engine(sqlite.url_in(tmp_path))
    yield engine
    engine.dispose()


def config(connection: sa.Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    config.attributes |= {"connection": connection, "metadata": Base.metadata}
    return config


def definitions(connection: sa.Connection) -> dict[str, str]:
    """Name -> SQL of every table and index, alembic's own excepted."""
    rows = connection.execute(sa.text("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")).all()
    return {name: " ".join(sql.split()) for name, sql in rows if not name.startswith("alembic")}


def test_an_upgraded_database_equals_the_tables(engine: sa.Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []
        checks = {  # which alembic does not compare
            table: sorted(str(check["sqltext"]) for check in sa.inspect(connection).get_check_constraints(table))
            for table in Base.metadata.tables
        }
    expected = {
        name: sorted(str(each.sqltext) for each in table.constraints if isinstance(each, sa.CheckConstraint))
        for name, table in Base.metadata.tables.items()
    }
    assert checks == expected
    assert sum(map(len, checks.values())) == 6


def test_down_to_nothing_and_up_again_gives_the_same_schema(engine: sa.Engine) -> None:
    with engine.begin() as connection:
        before = definitions(connection)
        command.downgrade(config(connection), "base")
        assert definitions(connection) == {}
        command.upgrade(config(connection), "head")
        assert definitions(connection) == before


TOKEN = "INSERT INTO tokens (id, scope, note, secret_hash, created_at) VALUES ('{}', 'worker', '', x'01', 0)"


def tokens(database: Database) -> int:
    with database.read() as session:
        return session.scalar(sa.text("SELECT count(*) FROM tokens")) or 0


def test_migrating_again_changes_nothing_and_keeps_the_rows(tmp_path: Path, database: Database) -> None:
    with database.write() as session:
        session.execute(sa.text(TOKEN.format("a")))
    database.close()
    with closing(Database(sqlite.url_in(tmp_path))) as again:
        assert tokens(again) == 1


def test_the_database_is_as_durable_as_the_design_says(database: Database) -> None:
    with database.read() as session:
        assert session.scalar(sa.text("PRAGMA journal_mode")) == "wal"
        assert session.scalar(sa.text("PRAGMA synchronous")) == 2  # FULL
        assert session.scalar(sa.text("PRAGMA foreign_keys")) == 1


def test_what_fails_within_a_write_leaves_nothing(database: Database) -> None:
    def fail_halfway() -> None:
        with database.write() as session:
            session.execute(sa.text(TOKEN.format("a")))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert tokens(database) == 0


def test_a_full_disk_is_told_from_other_faults(tmp_path: Path) -> None:
    engine = sa.create_engine("sqlite://")
    with engine.connect() as connection:
        connection.execute(sa.text("CREATE TABLE t (x)"))
        connection.execute(sa.text("PRAGMA max_page_count = 2"))
        with pytest.raises(sa.exc.OperationalError) as full:
            connection.execute(sa.text("INSERT INTO t VALUES (zeroblob(100000))"))
        with pytest.raises(sa.exc.OperationalError) as other:
            connection.execute(sa.text("INSERT INTO u VALUES (1)"))
    engine = sa.create_engine(f"sqlite:///file:{tmp_path}/read-only.db?mode=ro&uri=true")
    sqlite3.connect(tmp_path / "read-only.db").execute("CREATE TABLE t (x)")
    with engine.connect() as connection, pytest.raises(sa.exc.OperationalError) as read_only:
        connection.execute(sa.text("INSERT INTO t VALUES (1)"))
    (tmp_path / "spoilt.db").write_bytes(b"no database" * 100)
    engine = sa.create_engine(f"sqlite:///{tmp_path}/spoilt.db")
    with engine.connect() as connection, pytest.raises(sa.exc.DatabaseError) as spoilt:
        connection.execute(sa.text("CREATE TABLE t (x)"))
    assert fault_of(other.value) is None
    of_files = [OSError(number, "any") for number in (errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)]
    for error in (read_only.value, spoilt.value, *of_files):
        fault = fault_of(error)
        assert fault is not None
        assert fault.cause is Cause.STORAGE_UNAVAILABLE
    assert disk_is_full(full.value)
    assert not disk_is_full(other.value)
    assert disk_is_full(OSError(errno.ENOSPC, "no room"))
    assert not disk_is_full(FileNotFoundError(errno.ENOENT, "no file"))


RUN = "INSERT INTO runs (id, name, spec_toml, spec_digest, spec, state, created_at, round, next_unit) VALUES ({}, '{}', '', x'00', '{{}}', 'running', 0, 0, 0)"
UNITS = "INSERT INTO unit_ranges (run_id, start, stop, state, worker, round, consumed_round) VALUES (1, {}, {}, {}, {}, 0, {})"
FRAGMENT = "INSERT INTO fragments (run_id, round, fragment, state, reason, delta_digest) VALUES (1, 0, {}, {}, '', {})"
CONTRIBUTION = "INSERT INTO contributions VALUES ({}, 0, 0, 'w', x'00', NULL, 1, 1, 1, 1.0, 1.0, 0.0, NULL)"


WORKER = "INSERT INTO workers (run_id, name, place, state, epoch, token_hash, joined_at, host, metrics) VALUES (1, '{}', {}, 'live', 1, x'{}', 0, '{{}}', '{{}}')"
OF_REQUESTS = {"uq_runs_name", "uq_tokens_secret_hash", "uq_workers_token_hash"}


@pytest.mark.parametrize(
    ("statements", "constraint"),
    [
        pytest.param([RUN.format(2, "r")], "uq_runs_name", id="a run's name is its own"),
        pytest.param([TOKEN.format("a"), TOKEN.format("b")], "uq_tokens_secret_hash", id="a token's secret is its own"),
        pytest.param([WORKER.format("a", 0, "02"), WORKER.format("b", 1, "02")], "uq_workers_token_hash", id="so is a member's"),
        pytest.param([WORKER.format("a", 0, "02"), WORKER.format("b", 0, "03")], "ix_workers_run_id_place", id="a worker's place is its own"),
        pytest.param([UNITS.format(5, 5, "'free'", "NULL", "NULL")], "ck_unit_ranges_not_empty", id="no empty range"),
        pytest.param([UNITS.format(0, 5, "'lost'", "'w'", "NULL")], "ck_unit_ranges_state", id="no other state of units"),
        pytest.param([UNITS.format(0, 5, "'free'", "'w'", "NULL")], "ck_unit_ranges_free_has_no_worker", id="free units have no worker"),
        pytest.param([UNITS.format(0, 5, "'assigned'", "NULL", "NULL")], "ck_unit_ranges_free_has_no_worker", id="assigned units have a worker"),
        pytest.param([UNITS.format(0, 5, "'consumed'", "'w'", "NULL")], "ck_unit_ranges_consumed_once", id="consumed units have a round"),
        pytest.param([UNITS.format(0, 5, "'assigned'", "'w'", "3")], "ck_unit_ranges_consumed_once", id="only consumed units have"),
        pytest.param([UNITS.format(0, 5, "'assigned'", "'w'", "NULL")] * 2, "uq_unit_ranges_run_id_start", id="units are assigned once"),
        pytest.param([FRAGMENT.format(0, "'open'", "NULL")], "ck_fragments_state", id="no other state of a fragment"),
        pytest.param([FRAGMENT.format(0, "'published'", "NULL")], "ck_fragments_published_has_delta", id="what is published has a delta"),
        pytest.param([FRAGMENT.format(0, "'aggregating'", "x'00'")], "ck_fragments_published_has_delta", id="what has a delta is published"),
        pytest.param([CONTRIBUTION.format(1)] * 2, "pk_contributions", id="one contribution per fragment and worker"),
        pytest.param([CONTRIBUTION.format(7)], None, id="no contribution without its run"),  # SQLite does not name it
    ],
)  # fmt: skip
def test_the_database_itself_refuses_and_what_a_request_can_violate_is_a_problem(
    database: Database, statements: list[str], constraint: str | None
) -> None:
    *before, last = statements
    with database.write() as session:
        for statement in (RUN.format(1, "r"), *before):
            session.execute(sa.text(statement))
    with database.read() as session, pytest.raises(sa.exc.IntegrityError, match="constraint failed") as error:
        session.execute(sa.text(last))
    assert sqlite.violated(error.value) == constraint
    with pytest.raises((sa.exc.IntegrityError, Problem)) as refused, database.write() as session:
        session.execute(sa.text(last))
    slug = refused.value.slug if isinstance(refused.value, Problem) else None
    assert slug == (VIOLATIONS[str(constraint)][0] if constraint in OF_REQUESTS else None)
