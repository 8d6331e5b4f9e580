"""kill -9 of `outerstep coordinator backup` to a bucket, before and after each request that changes something there:
the backup of before is whole, the lock is another's once its time is over, and the next backup goes on.

The requests are those of an undisturbed command: so nothing that it does can be forgotten.
"""

import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.backup.create import BackupSource, CreatedBackup, create
from coordinator.backup.locations import open_store
from coordinator.backup.restore import restore
from coordinator.store import sqlite
from coordinator.store.opening import reader_of
from harness.coordinator import coordinator_thread
from protocol.errors import OuterstepError
from tests.coordinator.crew import crew, play_round
from tests.support.backing_up import back_up, check_restored, damages
from tests.support.crash_points import forked
from tests.support.crashing import run_bucket_backup

pytest.importorskip("obstore", reason="no object stores: pip install 'outerstep[remote]'")
pytest.importorskip("moto", reason="no S3 server for tests: pip install 'moto[s3]' flask flask-cors")

from coordinator.backup.bucket_lock import CLOCKS_S, LEASE_S
from outerstep.common.objects import PART_BYTES
from tests.support.s3_server import BUCKET, Request, S3Server, s3_server

pytestmark = pytest.mark.system


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Data directories of a run at two of its states. The second one's database goes up in parts."""
    folder = tmp_path_factory.mktemp("states")
    found = [folder / "state-0", folder / "state-1"]
    with coordinator_thread(folder / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=2, checkpoints="every_rounds = 1\nkeep = 1")
        for round_, state in enumerate(found):
            running.await_state("r", round_)
            back_up(running.data_dir, folder / "backups")
            restore(open_store(folder / "backups"), None, state)
            play_round([a], round_)
    with sqlite3.connect(found[1] / sqlite.FILE) as connection:
        connection.execute(f"CREATE TABLE bulk AS SELECT randomblob({PART_BYTES}) AS bytes")
    connection.close()
    return found


class Killing:
    """Kills the process `pid` before or after the `nth` request that changes something."""

    def __init__(self, s3: S3Server, nth: int, when: str) -> None:
        self.pid: int | None = None
        self.at: Request | None = None
        self._seen, self._nth = 0, nth
        s3.undisturbed()
        s3.fault = self._before
        if when == "after":
            s3.after = self._kill
        self._before_it = when == "before"

    def _before(self, request: Request) -> tuple[int, str] | None:
        if not request.changes or self.at is not None:
            return None
        self._seen += 1
        if self._seen <= self._nth:
            return None
        self.at = request
        return self._kill(request) if self._before_it else None

    def _kill(self, request: Request) -> tuple[int, str] | None:
        if request is not self.at:
            return None
        assert self.pid is not None
        os.kill(self.pid, signal.SIGKILL)
        return 500, "InternalError"  # nobody hears it


def run(folder: Path, s3: S3Server, data_dir: Path, url: str, killing: Killing | None = None) -> int | None:
    """Run the command; return its exit code."""
    folder.mkdir()
    process = forked(run_bucket_backup, folder, s3.environment(), data_dir, url)
    if killing is not None:
        killing.pid = process.pid
    process.join(120)
    return process.exitcode


def later(data_dir: Path, url: str) -> CreatedBackup:
    """A backup once the lock of any other that was killed is another's."""
    at = time.time() + LEASE_S + CLOCKS_S
    return create(BackupSource(sqlite.url_in(data_dir), reader_of(data_dir)), open_store(url, lambda: at), keep=1)


@pytest.mark.covers("reliability:bucket-backup-killed")
def test_a_backup_killed_at_each_request_leaves_a_whole_one_and_the_next_goes_on(
    s3: S3Server, states: list[Path], tmp_path: Path
) -> None:
    undisturbed = f"s3://{BUCKET}/undisturbed"
    back_up(states[0], undisturbed)
    s3.asked.clear()
    assert run(tmp_path / "undisturbed", s3, states[1], undisturbed) == 0, (tmp_path / "undisturbed/log").read_text()
    changes = [request for request in s3.asked if request.changes]
    wanted = s3.keys("undisturbed/blobs/")
    assert sum("partNumber" in request.query for request in changes) == 2
    held = 0
    for nth in range(len(changes)):
        for when in ("before", "after"):
            name = f"{when}-{nth}"
            url = f"s3://{BUCKET}/{name}"
            s3.undisturbed()
            back_up(states[0], url)
            killing = Killing(s3, nth, when)
            code = run(tmp_path / name, s3, states[1], url, killing)
            assert code == -signal.SIGKILL, (killing.at, (tmp_path / name / "log").read_text())
            s3.undisturbed()
            found = damages(url)
            assert found, killing.at
            assert set(found.values()) == {""}, killing.at
            check_restored(tmp_path / f"new-{name}", restore(open_store(url), None, tmp_path / f"new-{name}"))
            if b'"until":0.0' not in s3.read(f"{name}/lock"):
                held += 1
                with pytest.raises(OuterstepError, match=rf"in {url}, by \S+, process {killing.pid}: wait until"):
                    back_up(states[1], url)
            made = later(states[1], url)
            assert damages(url) == {made.manifest.number: ""}, killing.at
            assert made.manifest.number in (2, 3), "what was killed may have become one"
            assert s3.keys(f"{name}/blobs/") == wanted, killing.at
            assert len(s3.keys(f"{name}/backups/")) == 2, killing.at
    assert held == 2 * len(changes) - 2, "all but before it is taken, and after it is given back"
