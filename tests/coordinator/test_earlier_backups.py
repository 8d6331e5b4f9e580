"""Backups that an earlier version has made, or of a data directory that it has left: for each schema that there was."""

from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.script import ScriptDirectory

import migrations
from coordinator.backup.directory import BackupDirectory
from coordinator.backup.putting_back import restore
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store import sqlite
from coordinator.store.blobs import RunNames
from harness.member import spec_toml
from protocol.digest import digest
from tests.coordinator.test_migrations import config
from tests.support.backing_up import back_up, check_restored

SCHEMAS = sorted(each.revision for each in ScriptDirectory(str(Path(migrations.__file__).parent)).walk_revisions())

# Two rounds are published, of a third one fragment of two; the newest of two checkpoints covers the first.
NAMES = RunNames("r")
CONTRIBUTIONS = {(round_, p): b"contribution %d %d" % (round_, p) for round_ in range(3) for p in range(2)}
DELTAS = {place: b"delta %d %d" % place for place in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]}
CHECKPOINTS = {(round_, p): b"checkpoint %d %d" % (round_, p) for round_ in (0, 1) for p in range(2)}
NEEDED = {
    NAMES.contribution(2, 1, "w", digest(CONTRIBUTIONS[2, 1])),
    *(NAMES.delta(*place, digest(content)) for place, content in DELTAS.items()),
    *(NAMES.checkpoint(*place, digest(content)) for place, content in CHECKPOINTS.items()),
}


def fill(connection: sa.Connection) -> None:
    """Rows of the first schema."""

    def insert(table: str, **values: object) -> None:
        columns, places = ", ".join(values), ", ".join(f":{name}" for name in values)
        connection.execute(sa.text(f"INSERT INTO {table} ({columns}) VALUES ({places})"), values)  # noqa: S608, our own

    toml = spec_toml("r", rounds=9)
    insert("runs", id=1, name="r", spec_toml=toml, spec_digest=digest(toml.encode()), state="running", created_at=0.0, round=2, next_unit=20)  # fmt: skip
    insert(
        "workers", run_id=1, name="w", state="live", epoch=1, token_hash=b"w", joined_at=0.0, host="{}", metrics="{}"
    )
    insert("tokens", id="a", scope="admin", note="", secret_hash=b"a", created_at=0.0)
    for round_ in range(3):
        insert("rounds", run_id=1, round=round_, opened_at=1.0, closed_at=2.0 if round_ < 2 else None)
    for (round_, p), content in CONTRIBUTIONS.items():
        insert("contributions", run_id=1, round=round_, fragment=p, worker="w", digest=digest(content), size=len(content), tokens=1, inner_steps=1, loss=1.0, norm=1.0, accepted_at=1.0)  # fmt: skip
        delta = DELTAS.get((round_, p))
        known = {} if delta is None else {"delta_bytes": len(delta), "delta_digest": digest(delta)}
        state = "collecting" if delta is None else "published"
        insert("fragments", run_id=1, round=round_, fragment=p, state=state, reason="", **known)
    for (round_, p), content in CHECKPOINTS.items():
        insert("checkpoint_fragments", run_id=1, round=round_, fragment=p, size=len(content), digest=digest(content), state_digest=b"s")  # fmt: skip
    for round_ in (0, 1):
        insert("checkpoints", run_id=1, round=round_, created_at=1.0, state_digest=b"s")


def data_directory(folder: Path, schema: str) -> None:
    """What a coordinator of that schema has left."""
    folder.mkdir()
    engine = sa.create_engine(sqlite.url_in(folder))
    with engine.begin() as connection:
        command.upgrade(config(connection), "0001")
        fill(connection)
        command.upgrade(config(connection), schema)
    engine.dispose()
    blobs = {
        **{NAMES.contribution(*place, "w", digest(content)): content for place, content in CONTRIBUTIONS.items()},
        **{NAMES.delta(*place, digest(content)): content for place, content in DELTAS.items()},
        **{NAMES.checkpoint(*place, digest(content)): content for place, content in CHECKPOINTS.items()},
    }
    for name, content in blobs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.mark.covers("reliability:earlier-backups")
@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_backup_of_each_earlier_schema_is_restored_and_opened(tmp_path: Path, schema: str) -> None:
    data_directory(tmp_path / "data", schema)
    manifest = back_up(tmp_path / "data", tmp_path / "backups").manifest
    assert {blob.name for blob in manifest.blobs} == NEEDED
    assert [(run.name, run.round) for run in manifest.runs] == [("r", 2)]
    new = tmp_path / "new"
    check_restored(new, restore(BackupDirectory(tmp_path / "backups"), None, new))
    engine = sa.create_engine(sqlite.url_in(new))
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT version_num FROM alembic_version")) == schema, "as it was"
    engine.dispose()

    coordinator = Coordinator(Settings(data_dir=new))
    try:
        run = coordinator.run("r")
        assert (run.round, run.spec.sync.rounds) == (2, 9)
        assert {name for name, _ in run.blobs.list(run.names.all)} == NEEDED, "none was swept"
        with coordinator.database.read() as session:
            assert session.execute(sa.text("SELECT name, state, token_hash FROM workers")).all() == [
                ("w", "lost", None)
            ]
            assert session.execute(sa.text("SELECT kind FROM events")).all() == [("restored-from-backup",)]
            assert session.scalar(sa.text("SELECT count(*) FROM contributions")) == len(CONTRIBUTIONS)
    finally:
        coordinator.close()
