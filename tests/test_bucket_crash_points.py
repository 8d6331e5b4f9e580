"""kill -9 of a coordinator that backs itself up in a bucket, and of a restore from there, before and after each request
that changes something in the bucket: there is a whole backup at every instant, and whoever comes next goes on.

The requests are those of an undisturbed process: so nothing that it does can be forgotten.
"""

import os
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coordinator.backup.restore import Target, restore
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store import sqlite
from harness.coordinator import coordinator_thread
from tests.coordinator.crew import crew, play_round
from tests.coordinator.test_bucket_backups import backups
from tests.support.backing_up import damages
from tests.support.crash_points import forked
from tests.support.crashing import run_bucket_restore, run_bucket_start

pytest.importorskip("obstore", reason="no object stores: pip install 'outerstep[remote]'")
pytest.importorskip("moto", reason="no S3 server for tests: pip install 'moto[s3]' flask flask-cors")

from outerstep.common.bucket_check import FOLDER
from tests.support.s3_server import BUCKET, Request, S3Server, s3_server
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.system

Play = Callable[[Path, dict[str, str], Path, str], None]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def prepared(s3: S3Server, tmp_path: Path) -> Callable[[str], tuple[Path, str]]:
    """Return a data directory and its bucket, in which a run has played two rounds, by name."""
    url = f"s3://{BUCKET}/prepared"
    with coordinator_thread(tmp_path / "prepared", blobs=url) as running:
        (a,) = crew(running, "r", ["a"], rounds=9, checkpoints="every_rounds = 1\nkeep = 1")
        for round_ in range(2):
            play_round([a], round_)
            running.await_state("r", round_ + 1)
    content = {key: s3.read(f"prepared/{key}") for key in s3.keys("prepared/")}

    def copy(name: str) -> tuple[Path, str]:
        for key, value in content.items():
            s3.write(f"{name}/{key}", value)
        shutil.copytree(tmp_path / "prepared", tmp_path / name)
        with sqlite3.connect(tmp_path / name / sqlite.FILE) as database:
            database.execute("UPDATE deployment SET bucket_url = ?", [f"s3://{BUCKET}/{name}"])
        database.close()
        return tmp_path / name, f"s3://{BUCKET}/{name}"

    return copy


def counts(request: Request) -> bool:
    """Whether it changes something, unless it only tries what the store can do."""
    return request.changes and f"/{FOLDER}/" not in request.path


class Killing:
    """Kills the process `pid` before or after the `nth` request that counts."""

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
        if not counts(request) or self.at is not None:
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


def run(act: Play, folder: Path, s3: S3Server, data_dir: Path, url: str, killing: Killing | None = None) -> int | None:
    """Run a process; return its exit code."""
    folder.mkdir()
    process = forked(act, folder, s3.environment(), data_dir, url)
    if killing is not None:
        killing.pid = process.pid
    process.join(PATIENCE_S)
    return process.exitcode


def changes(s3: S3Server, act: Play, tmp_path: Path, data_dir: Path, url: str) -> int:
    """Return how many requests of an undisturbed process change something."""
    s3.asked.clear()
    assert run(act, tmp_path / "undisturbed-log", s3, data_dir, url) == 0, (
        tmp_path / "undisturbed-log/log"
    ).read_text()
    return sum(counts(request) for request in s3.asked)


def killed(s3: S3Server, act: Play, folder: Path, data_dir: Path, url: str, nth: int, when: str) -> Request | None:
    killing = Killing(s3, nth, when)
    code = run(act, folder, s3, data_dir, url, killing)
    assert code == -signal.SIGKILL, (killing.at, (folder / "log").read_text())
    s3.undisturbed()
    return killing.at


def whole(url: str) -> list[int]:
    """Return the numbers of the backups, of which all are whole."""
    found = damages(backups(url))
    assert set(found.values()) == {""}
    return list(found)


@pytest.mark.nightly
@pytest.mark.covers("reliability:bucket-backup-killed")
def test_a_start_killed_at_each_request_leaves_whole_backups_and_the_next_one_goes_on(
    s3: S3Server, prepared: Callable[[str], tuple[Path, str]], tmp_path: Path
) -> None:
    data_dir, url = prepared("undisturbed")
    newest = max(whole(url))
    for nth in range(changes(s3, run_bucket_start, tmp_path, data_dir, url)):
        for when in ("before", "after"):
            data_dir, url = prepared(f"{when}-{nth}")
            at = killed(s3, run_bucket_start, tmp_path / f"{when}-{nth}-log", data_dir, url, nth, when)
            assert max(whole(url)) in (newest, newest + 1), at
            Coordinator(Settings(data_dir=data_dir, blobs=url)).close()
            assert max(whole(url)) in (newest + 1, newest + 2), at
            assert len(s3.keys(f"{when}-{nth}/database/")) == 2 * 3, at
            assert s3.keys(f"{when}-{nth}/runs/") <= s3.keys("undisturbed/runs/"), at


@pytest.mark.covers("reliability:bucket-restore-killed")
def test_a_restore_killed_at_each_request_can_be_repeated(
    s3: S3Server, prepared: Callable[[str], tuple[Path, str]], tmp_path: Path
) -> None:
    _, url = prepared("undisturbed")
    for nth in range(changes(s3, run_bucket_restore, tmp_path, tmp_path / "new", url)):
        for when in ("before", "after"):
            name = f"{when}-{nth}"
            _, url = prepared(name)
            new = tmp_path / f"new-{name}"
            at = killed(s3, run_bucket_restore, tmp_path / f"{name}-log", new, url, nth, when)
            whole(url)
            restore(backups(url), None, Target(new))
            service = Coordinator(Settings(data_dir=new, blobs=url))
            assert service.run("r").round == 2, at
            service.close()
            whole(url)
            assert len(s3.keys(f"{name}/database/")) == 2 * 2, (at, "what was restored, and that of the start")
