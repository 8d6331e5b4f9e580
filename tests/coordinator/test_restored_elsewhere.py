"""A backup is restored into another kind of store than it was made of: this is how a coordinator moves."""

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import URL, make_url

from coordinator.backup import restore as restoring
from coordinator.backup.bucket import BucketBackups
from coordinator.backup.directory import BackupSource, DirectoryBackups
from coordinator.backup.restore import Backups, Target, restore
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store import sqlite
from coordinator.store.opening import reader_of
from harness.coordinator import InThread, coordinator_thread
from harness.member import Member
from harness.postgres import PostgreSQL
from harness.seaweedfs import SeaweedFS
from harness.stores import names, read
from protocol.errors import OuterstepError
from tests.coordinator.crew import crew, enlist, info, play_round, ready
from tests.coordinator.test_backup import caught_up
from tests.coordinator.test_removing import leave
from tests.support.cases import in_the_night

pytest.importorskip("obstore", reason="no object stores: pip install 'outerstep[remote]'")

from outerstep.common.objects import Objects

pytestmark = [pytest.mark.in_directory, pytest.mark.in_sqlite]

CHECKPOINTS = "every_rounds = 1\nkeep = 20"
_numbers = itertools.count()


@pytest.fixture
def url(store: SeaweedFS) -> str:
    return store.url(f"restored-elsewhere/{next(_numbers)}")


@pytest.fixture
def database(postgres: PostgreSQL) -> str:
    return postgres.create(f"restored{next(_numbers)}")


def after_two_rounds(running: InThread) -> list[Member]:
    members = crew(running, "r", ["a", "b"], rounds=20, min_workers=2, checkpoints=CHECKPOINTS)
    for round_ in range(2):
        play_round(members, round_)
        running.await_state("r", round_ + 1)
    return members


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory in which a run of two workers has played two rounds and begun a third."""
    with coordinator_thread(tmp_path / "data") as running:
        members = after_two_rounds(running)
        ready(members, 2)
        members[0].take_part(2)
        for member in members:
            leave(member)
    return tmp_path / "data"


def contents(running: InThread) -> dict[str, bytes]:
    """What a backup has of the run's blobs."""
    live = running.live("r")
    found = (name for kind in ("contributions", "deltas", "checkpoints") for name in names(live, kind))
    return {name: read(live.blobs, name) for name in found if "contributions/0/" not in name and "/1/" not in name}


def backed_up(data: Path, place: Path, database: URL | None = None) -> DirectoryBackups:
    url = database or sqlite.url_in(data)
    backups = DirectoryBackups(place)
    backups.make(BackupSource(url, reader_of(data, url)), 7)
    return backups


def go_on(running: InThread, round_: int) -> None:
    members = [caught_up(enlist(running, "r", name)) for name in ("a", "b")]
    assert info(running, "r")["round"] == round_
    play_round(members, round_)
    running.await_state("r", round_ + 1)
    for member in members:
        leave(member)


@pytest.mark.slow
@pytest.mark.covers("reliability:restored-elsewhere")
def test_into_a_bucket_and_back_and_the_run_goes_on_in_each(tmp_path: Path, url: str, data: Path) -> None:
    with coordinator_thread(data) as running:
        before = contents(running)
    assert sum("/contributions/" in name for name in before) == 2, "those that are in no delta yet"
    restore(backed_up(data, tmp_path / "backups"), None, Target(tmp_path / "b", url))
    assert not list((tmp_path / "b").glob("runs/*/deltas"))
    with coordinator_thread(tmp_path / "b", token_in=tmp_path / "data", blobs=url) as running:
        assert before.items() <= contents(running).items()
        go_on(running, 2)
        before = contents(running)
    with pytest.raises(OuterstepError, match=re.escape(f"are in {url}, and {url}-empty has none: give --blobs {url}")):
        Coordinator(Settings(data_dir=tmp_path / "b", blobs=f"{url}-empty"))
    restore(backed_up(tmp_path / "b", tmp_path / "more"), None, Target(tmp_path / "c"))
    with coordinator_thread(tmp_path / "c", token_in=tmp_path / "data") as running:
        kept = {name: content for name, content in before.items() if "/contributions/" not in name}
        assert kept.items() <= contents(running).items()
        go_on(running, 3)


@pytest.mark.slow
@pytest.mark.covers("reliability:restored-elsewhere")
def test_into_postgresql_and_back(tmp_path: Path, url: str, database: str, data: Path) -> None:
    target = Target(tmp_path / "b", url, make_url(database))
    restore(backed_up(data, tmp_path / "backups"), None, target)
    with coordinator_thread(tmp_path / "b", token_in=tmp_path / "data", blobs=url, database=database) as running:
        go_on(running, 2)
        with pytest.raises(OuterstepError, match="is in use already"):
            restore(backed_up(data, tmp_path / "backups"), None, Target(tmp_path / "x", f"{url}-x", make_url(database)))
    back = backed_up(tmp_path / "b", tmp_path / "more", make_url(database))
    restore(back, None, Target(tmp_path / "c"))
    with coordinator_thread(tmp_path / "c", token_in=tmp_path / "data") as running:
        go_on(running, 3)


@pytest.mark.slow
@pytest.mark.covers("reliability:restored-elsewhere")
def test_a_backup_in_a_bucket_leaves_its_files_there(tmp_path: Path, url: str, database: str) -> None:
    with coordinator_thread(tmp_path / "a", blobs=url) as running:
        after_two_rounds(running)
    restore(BucketBackups.of(Objects(url)), None, Target(tmp_path / "b", database=make_url(database)))
    with coordinator_thread(tmp_path / "b", token_in=tmp_path / "a", blobs=url, database=database) as running:
        go_on(running, 2)


@contextmanager
def killed(owner: object, step: str, when: str) -> Iterator[None]:
    """Within the block a function of `owner` is killed before or after it has done anything, and so is the block."""
    real: Callable[..., object] = getattr(owner, step)

    def dies(*arguments: object) -> None:
        if when == "after":
            real(*arguments)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, step, dies)
        with pytest.raises(KeyboardInterrupt):
            yield


STEPS = [
    in_the_night(False, restoring, "_fill", "before"),
    pytest.param(False, restoring, "_fill", "after"),
    in_the_night(True, restoring, "_fill", "before"),
    in_the_night(True, restoring, "_fill", "after"),
    in_the_night(True, BucketBackups, "pass_on", "before"),
    pytest.param(True, BucketBackups, "pass_on", "after"),
]


@pytest.mark.slow
@pytest.mark.covers("reliability:restored-elsewhere")
@pytest.mark.parametrize(("from_bucket", "owner", "step", "when"), STEPS)
def test_a_restore_that_is_killed_can_be_repeated(
    tmp_path: Path, url: str, database: str, data: Path, from_bucket: bool, owner: object, step: str, when: str
) -> None:
    backups: Backups = backed_up(data, tmp_path / "backups")
    target = Target(tmp_path / "c", None if from_bucket else url, make_url(database))
    if from_bucket:
        restore(backups, None, Target(tmp_path / "b", url))
        with coordinator_thread(tmp_path / "b", token_in=tmp_path / "data", blobs=url):
            pass
        backups = BucketBackups.of(Objects(url))
    with killed(owner, step, when):
        restore(backups, None, target)
    restore(BucketBackups.of(Objects(url)) if from_bucket else backups, None, target)
    with coordinator_thread(tmp_path / "c", token_in=tmp_path / "data", blobs=url, database=database) as running:
        go_on(running, 2)


@pytest.mark.slow
def test_a_repeated_restore_undoes_nothing_that_was_done_since(
    tmp_path: Path, url: str, database: str, data: Path
) -> None:
    """It was killed at its end, and somebody started a coordinator all the same, from another data directory."""
    backups, target = backed_up(data, tmp_path / "backups"), Target(tmp_path / "b", url, make_url(database))
    with killed(restoring, "_fill", "after"):  # its last step
        restore(backups, None, target)
    with coordinator_thread(tmp_path / "other", token_in=data, blobs=url, database=database) as running:
        go_on(running, 2)
    restore(backups, None, target)
    with coordinator_thread(tmp_path / "b", token_in=tmp_path / "data", blobs=url, database=database) as running:
        assert info(running, "r")["round"] == 3


@pytest.mark.slow
def test_what_is_refused(tmp_path: Path, url: str, database: str, data: Path) -> None:
    backups = backed_up(data, tmp_path / "backups")
    with coordinator_thread(tmp_path / "other", blobs=url, database=database) as running:
        crew(running, "r", ["a"], rounds=2, min_workers=1)
        with pytest.raises(OuterstepError, match=re.escape(f"the bucket {url} belongs to another coordinator")):
            restore(backups, None, Target(tmp_path / "b", url))
    with pytest.raises(OuterstepError, match="is in use already: give another one"):
        restore(backups, None, Target(tmp_path / "c", f"{url}-new", make_url(database)))
    restore(backups, None, Target(tmp_path / "c"))
    with coordinator_thread(tmp_path / "c", token_in=tmp_path / "data") as running:
        go_on(running, 2)
