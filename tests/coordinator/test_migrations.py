"""The migrations make exactly the tables, and the tables keep their promises."""

import errno
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext

import migrations
from coordinator.store import sqlite
from coordinator.store.database import Database, disk_is_full, fault_of
from coordinator.store.tables import Base
from protocol.messages import Cause
from protocol.spec.run import RunSpec


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[sa.Engine]:
    Database(sqlite.url_in(tmp_path)).close()
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


def test_migrating_again_changes_nothing_and_keeps_the_rows(tmp_path: Path) -> None:
    Database(sqlite.url_in(tmp_path)).close()
    database = Database(sqlite.url_in(tmp_path))
    with database.write() as session:
        session.execute(
            sa.text(
                "INSERT INTO tokens (id, scope, note, secret_hash, created_at) VALUES ('a', 'admin', '', x'00', 0.0)"
            )
        )
    database.close()
    Database(sqlite.url_in(tmp_path)).close()
    database = Database(sqlite.url_in(tmp_path))
    with database.read() as session:
        assert session.scalar(sa.text("SELECT count(*) FROM tokens")) == 1
    database.close()


def test_runs_of_an_older_database_go_on(engine: sa.Engine) -> None:
    """Each worker gets a place in its own run, and what was measured of a state stays."""
    joined = [(1, "b"), (2, "x"), (1, "a"), (2, "b")]
    with engine.begin() as connection:
        command.downgrade(config(connection), "0003")
        for run in (1, 2):
            connection.execute(sa.text(RUN.format(run, f"run-{run}")))
        for run, name in joined:
            connection.execute(sa.text(WORKER), {"run": run, "name": name})
        connection.execute(sa.text("INSERT INTO evaluations VALUES (1, 3, 'b', 2.5, 64)"))
        command.upgrade(config(connection), "head")
        workers = connection.execute(sa.text("SELECT run_id, name, place, next_unit, units FROM workers")).all()
        assert set(workers) == {(1, "b", 0, 0, None), (1, "a", 1, 0, None), (2, "x", 0, 0, None), (2, "b", 1, 0, None)}
        assert connection.execute(sa.text("SELECT * FROM evaluations")).all() == [(1, 3, "b", 2.5, 64, None, 1)]
        assert connection.execute(sa.text("SELECT frozen FROM runs")).all() == [(None,), (None,)]


def test_runs_of_an_older_database_keep_the_defaults_of_then(engine: sa.Engine) -> None:
    told = """
        model.config = {model_type = "llama", hidden_size = 64, since = 2020-02-02}
        sync.rounds = 7
        inner.beta2 = 0.99
    """
    with engine.begin() as connection:
        command.downgrade(config(connection), "0006")
        connection.execute(sa.text(RUN.format(1, "r")))
        connection.execute(sa.text("UPDATE runs SET spec_toml = :told"), {"told": f'name = "r"\n{told}'})
        command.upgrade(config(connection), "head")
        found = json.loads(connection.scalar(sa.text("SELECT spec FROM runs")))
    spec = RunSpec.model_validate(found)
    assert (spec.inner.optimizer, spec.inner.learning_rate, spec.inner.beta2) == ("adamw", 4e-4, 0.99)
    assert (spec.outer.learning_rate, spec.outer.momentum) == (0.7, 0.9)
    assert spec.sync.rounds == 7
    assert spec.model.config == {"model_type": "llama", "hidden_size": 64, "since": "2020-02-02"}
    assert found["evaluation"] == {"every_rounds": 1, "max_tokens": 65_536}, "in full, where nothing was given"


def test_tokens_of_an_older_database_are_for_all_that_they_were(engine: sa.Engine) -> None:
    """And the names of its workers belong to whoever joins next."""
    token = "INSERT INTO tokens (id, scope, note, secret_hash, created_at) VALUES ('{0}', '{1}', '', x'0{0}', 5.5)"
    with engine.begin() as connection:
        command.downgrade(config(connection), "0010")
        for number, scope in enumerate(("admin", "worker", "viewer")):
            connection.execute(sa.text(token.format(number, scope)))
        connection.execute(sa.text(RUN.format(1, "r")))
        connection.execute(sa.text(WORKER), {"run": 1, "name": "w"})
        command.upgrade(config(connection), "head")
        found = "SELECT id, scope, created_at, run, names, uses, used, expires_at FROM tokens ORDER BY id"
        kept = [
            (str(n), scope, 5.5, None, None, None, 0, None) for n, scope in enumerate(("admin", "worker", "viewer"))
        ]
        assert [tuple(row) for row in connection.execute(sa.text(found))] == kept
        assert connection.scalar(sa.text("SELECT token FROM workers")) is None
        more = "UPDATE tokens SET {} WHERE id = '{}'"
        connection.execute(sa.text(more.format("run = 'r'", 1)))
        connection.execute(sa.text(more.format("scope = 'operator'", 2)))
        command.downgrade(config(connection), "0010")
        assert connection.execute(sa.text("SELECT id FROM tokens")).all() == [("0",)], "the others would be for all"


def test_the_database_is_as_durable_as_the_design_says(tmp_path: Path) -> None:
    database = Database(sqlite.url_in(tmp_path))
    with database.read() as session:
        assert session.scalar(sa.text("PRAGMA journal_mode")) == "wal"
        assert session.scalar(sa.text("PRAGMA synchronous")) == 2  # FULL
        assert session.scalar(sa.text("PRAGMA foreign_keys")) == 1
    database.close()


def test_what_fails_within_a_write_leaves_nothing(tmp_path: Path) -> None:
    database = Database(sqlite.url_in(tmp_path))

    def fail_halfway() -> None:
        with database.write() as session:
            session.execute(
                sa.text(
                    "INSERT INTO tokens (id, scope, note, secret_hash, created_at) VALUES ('a', 'admin', '', x'00', 0.0)"
                )
            )
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    with database.read() as session:
        assert session.scalar(sa.text("SELECT count(*) FROM tokens")) == 0
    database.close()


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
    for error in (read_only.value, spoilt.value, OSError(errno.EROFS, "read-only")):
        fault = fault_of(error)
        assert fault is not None
        assert fault.cause is Cause.STORAGE_UNAVAILABLE
    assert disk_is_full(full.value)
    assert not disk_is_full(other.value)
    assert disk_is_full(OSError(errno.ENOSPC, "no room"))
    assert not disk_is_full(FileNotFoundError(errno.ENOENT, "no file"))


RUN = "INSERT INTO runs (id, name, spec_toml, spec_digest, state, created_at, round, next_unit) VALUES ({}, '{}', '', x'00', 'running', 0, 0, 0)"
WORKER = "INSERT INTO workers (run_id, name, state, epoch, joined_at, host, metrics) VALUES (:run, :name, 'live', 1, 0, '{}', '{}')"
UNITS = "INSERT INTO unit_ranges (run_id, start, stop, state, worker, round, consumed_round) VALUES (1, {}, {}, {}, {}, 0, {})"
FRAGMENT = "INSERT INTO fragments (run_id, round, fragment, state, reason, delta_digest) VALUES (1, 0, {}, {}, '', {})"
CONTRIBUTION = "INSERT INTO contributions VALUES ({}, 0, 0, 'w', x'00', 1, 1, 1, 1.0, 1.0, 0.0)"


@pytest.mark.parametrize(
    ("statements", "constraint"),
    [
        pytest.param([RUN.format(2, "r")], "UNIQUE.*runs.name", id="a run's name is its own"),
        pytest.param([UNITS.format(5, 5, "'free'", "NULL", "NULL")], "ck_unit_ranges_not_empty", id="no empty range"),
        pytest.param([UNITS.format(0, 5, "'lost'", "'w'", "NULL")], "ck_unit_ranges_state", id="no other state of units"),
        pytest.param([UNITS.format(0, 5, "'free'", "'w'", "NULL")], "ck_unit_ranges_free_has_no_worker", id="free units have no worker"),
        pytest.param([UNITS.format(0, 5, "'assigned'", "NULL", "NULL")], "ck_unit_ranges_free_has_no_worker", id="assigned units have a worker"),
        pytest.param([UNITS.format(0, 5, "'consumed'", "'w'", "NULL")], "ck_unit_ranges_consumed_once", id="consumed units have a round"),
        pytest.param([UNITS.format(0, 5, "'assigned'", "'w'", "3")], "ck_unit_ranges_consumed_once", id="only consumed units have"),
        pytest.param([UNITS.format(0, 5, "'assigned'", "'w'", "NULL")] * 2, "UNIQUE.*unit_ranges.run_id, unit_ranges.start", id="units are assigned once"),
        pytest.param([FRAGMENT.format(0, "'open'", "NULL")], "ck_fragments_state", id="no other state of a fragment"),
        pytest.param([FRAGMENT.format(0, "'published'", "NULL")], "ck_fragments_published_has_delta", id="what is published has a delta"),
        pytest.param([FRAGMENT.format(0, "'aggregating'", "x'00'")], "ck_fragments_published_has_delta", id="what has a delta is published"),
        pytest.param([CONTRIBUTION.format(1)] * 2, "UNIQUE.*contributions", id="one contribution per fragment and worker"),
        pytest.param([CONTRIBUTION.format(7)], "FOREIGN KEY", id="no contribution without its run"),
    ],
)  # fmt: skip
def test_the_database_itself_refuses(tmp_path: Path, statements: list[str], constraint: str) -> None:
    database = Database(sqlite.url_in(tmp_path))
    with database.write() as session:
        session.execute(sa.text(RUN.format(1, "r")))
    with database.read() as session:
        for statement in statements[:-1]:
            session.execute(sa.text(statement))
        with pytest.raises(sa.exc.IntegrityError, match=constraint):
            session.execute(sa.text(statements[-1]))
    database.close()


def test_an_upgrade_from_the_first_schema_keeps_the_data_and_counts_it(tmp_path: Path) -> None:
    engine = sa.create_engine(sqlite.url_in(tmp_path))
    contribution = "INSERT INTO contributions VALUES (1, {}, {}, '{}', x'00', {}, {}, 5, 1.0, 1.0, 0.0)"
    worker = "INSERT INTO workers (run_id, name, state, epoch, joined_at, host, metrics) VALUES (1, '{}', 'left', 1, 0, '{{}}', '{{}}')"
    statements = [
        RUN.format(1, "r"),
        worker.format("a"),
        worker.format("b"),
        *(contribution.format(round_, p, "a", 100, 64) for round_ in (0, 1) for p in (0, 1)),
        contribution.format(0, 0, "b", 10, 32),
        UNITS.format(0, 2, "'consumed'", "'a'", "0"),
        UNITS.format(2, 3, "'consumed'", "'b'", "0"),
        UNITS.format(3, 5, "'free'", "NULL", "NULL"),
        "INSERT INTO rounds VALUES (1, 0, 5.0, NULL)",
        "INSERT INTO events (run_id, at, kind, message, data) VALUES (1, 0, 'diverged', 'a diverged', '{}')",
    ]
    with engine.begin() as connection:
        command.upgrade(config(connection), "0001")
        for statement in statements:
            connection.execute(sa.text(statement.replace(":", r"\:")))
    Database(sqlite.url_in(tmp_path)).close()
    with engine.begin() as connection:
        workers = connection.execute(sa.text("SELECT name, contributions, tokens, upload_bytes FROM workers")).all()
        assert [tuple(row) for row in workers] == [("a", 2, 128, 400), ("b", 1, 32, 10)]
        run = connection.execute(sa.text("SELECT tokens, upload_bytes, divergences, checked_epochs FROM runs")).one()
        assert tuple(run) == (160, 410, 1, 0)
        units = "SELECT start, stop, state, worker, consumed_round FROM unit_ranges ORDER BY start"
        kept = [(0, 2, "consumed", "a", 0), (2, 3, "consumed", "b", 0), (3, 5, "free", None, None)]
        assert [tuple(row) for row in connection.execute(sa.text(units))] == kept
        assert connection.execute(sa.text("SELECT opened_at, tokens FROM rounds")).one() == (5.0, None)
        command.downgrade(config(connection), "0001")
        assert [tuple(row) for row in connection.execute(sa.text(units))] == kept
    engine.dispose()
