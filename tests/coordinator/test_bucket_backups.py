"""Backups of a coordinator whose blobs are in a bucket: when they are made, what stays for them, and what they restore."""

import itertools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from coordinator.backup.bucket import KEPT, BucketBackups
from coordinator.backup.contents import DamagedBackup, blobs_of
from coordinator.backup.restore import Target, restore
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store import sqlite
from coordinator.store.blobs import StoreOutage
from coordinator.store.payloads import READ_BYTES
from harness.coordinator import InThread, SettableClock, coordinator_thread
from harness.seaweedfs import SeaweedFS
from harness.stores import read, rounds
from outerstep.common import files
from protocol.digest import Buffer
from protocol.errors import OuterstepError
from protocol.messages import RunState
from tests.coordinator.crew import crew, enlist, events, info, play_round, play_rounds
from tests.coordinator.test_backup import caught_up
from tests.coordinator.test_removing import finished, leave, remove
from tests.support import backing_up
from tests.support.backing_up import round_in
from tests.support.waiting import wait_until

pytest.importorskip("obstore", reason="no object stores: pip install 'outerstep[remote]'")

from outerstep.common.objects import Objects

pytestmark = pytest.mark.slow

SHORT, LONG = "every_rounds = 1\nkeep = 1", "every_rounds = 1\nkeep = 20"
_numbers = itertools.count()


@pytest.fixture
def url(store: SeaweedFS) -> str:
    return store.url(f"bucket-backups/{next(_numbers)}")


def backups(url: str) -> BucketBackups:
    return BucketBackups.of(Objects(url))


def damages(url: str) -> dict[int, str]:
    return backing_up.damages(backups(url))


def states(url: str, run: str = "r") -> dict[int, int]:
    """Return the run's state in each backup."""
    found = backups(url)
    return {
        number: each.round for number in found.numbers() for each in found.manifest(number).runs if each.name == run
    }


def play(url: str, data_dir: Path, number: int, checkpoints: str = SHORT) -> None:
    """Play that many rounds of the run r of one worker, with a checkpoint of each."""
    with coordinator_thread(data_dir, blobs=url) as running:
        (a,) = crew(running, "r", ["a"], rounds=20, checkpoints=checkpoints)
        play_rounds(running, [a], range(number))


def go_on(running: InThread, run: str, names: list[str], round_: int) -> None:
    """Let workers join again and play a round."""
    play_rounds(running, [caught_up(enlist(running, run, name)) for name in names], [round_])


# --- making them ------------------------------------------------------------------------------------------------------


def test_one_is_made_at_the_start_and_after_every_checkpoint_and_every_kept_one_is_whole(
    url: str, tmp_path: Path
) -> None:
    with coordinator_thread(tmp_path / "data", blobs=url) as running:
        assert backups(url).numbers() == [1]
        (a,) = crew(running, "r", ["a"], rounds=20, checkpoints=SHORT)
        for round_ in range(5):
            play_rounds(running, [a], [round_])
            assert states(url)[max(states(url))] == round_ + 1
            assert set(damages(url).values()) == {""}
        assert sorted(states(url).values()) == [3, 4, 5]
        assert rounds(running.live("r"), "checkpoints") == [3, 4, 5], "the older ones are the backups'"
        assert rounds(running.live("r"), "contributions") == []
        assert httpx.get(f"{running.url}/readyz").json()["last_backup_at"] == running.coordinator.last_backup_at
    found = list(Objects(url).within("database"))
    assert len(found) == 2 * KEPT, "nothing is left of the older ones"


@pytest.mark.in_sqlite
def test_one_is_made_after_a_while_without_a_checkpoint_too(url: str, tmp_path: Path) -> None:
    clock, started = SettableClock(), time.time()
    begun = clock()
    settings: dict[str, Any] = {"blobs": url, "backup_every_s": 600.0}
    with coordinator_thread(
        tmp_path / "data", clock=clock, now=lambda: started + clock() - begun, **settings
    ) as running:
        crew(running, "r", ["a"], rounds=2, members="lease_s = 86400")
        wait_until(lambda: states(url) != {})
        before = max(backups(url).numbers())
        clock.advance(601.0)
        wait_until(lambda: max(backups(url).numbers()) == before + 1)


def away(*_: object) -> None:
    raise OuterstepError("the store is away")


def test_where_the_bucket_is_away_nothing_is_deleted_and_the_failure_is_reported(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with coordinator_thread(tmp_path / "data", blobs=url) as running:
        (a,) = crew(running, "r", ["a"], rounds=20, checkpoints=SHORT)
        running.await_state("r", 0)
        whole = damages(url)
        with monkeypatch.context() as broken:
            broken.setattr(BucketBackups, "add", away)
            play_round([a], 0)
            wait_until(lambda: len(events(running, "r", "backup-failed")) == 1)
            assert "the store is away" in events(running, "r", "backup-failed")[0]["message"]
            running.await_state("r", 1)
        assert rounds(running.live("r"), "checkpoints") == [0, 1]
        assert damages(url) == whole
        play_round([a], 1)
        wait_until(lambda: len(events(running, "r", "backup-made")) == 1)


def test_one_whose_answer_was_lost_is_no_reason_to_fail_ever_after(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with coordinator_thread(tmp_path / "data", blobs=url) as running:
        crew(running, "r", ["a"], rounds=2)
        before, real = max(backups(url).numbers()), BucketBackups.add

        def lost(*given: Any) -> None:
            real(*given)
            raise OuterstepError("no answer")

        context = running.live("r").context
        with monkeypatch.context() as broken:
            broken.setattr(BucketBackups, "add", lost)
            with pytest.raises(StoreOutage, match="no answer"):
                context.back_up()
        running.create_run('name = "later"\n[data]\nsource = "custom"\n[sync]\nrounds = 1\n')
        context.back_up()
        assert max(backups(url).numbers()) == before + 2


def test_a_run_that_was_removed_is_in_no_backup_and_leaves_nothing(url: str, tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data", blobs=url) as running:
        leave(finished(running, "r"))
        remove(running, "r")
    assert damages(url) == {max(damages(url)): ""}
    assert states(url) == {}
    assert list(Objects(url).within("runs")) == []


def test_the_backup_after_a_rollback_is_whole(url: str, tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data", blobs=url) as running:
        (a,) = crew(running, "r", ["a"], rounds=20, checkpoints=LONG)
        play_rounds(running, [a], range(3))
        running.client().post("/v1/runs/r/rollback", json={"to": 1, "from_round": 3}).raise_for_status()
        assert damages(url) == {max(damages(url)): ""}
        assert set(states(url).values()) == {1}
        stored = dict.fromkeys(("contributions", "deltas", "checkpoints", "set-aside"), 0)
        for name, size in Objects(url).within("runs/r"):
            stored[name.split("/")[0]] += size
        shown = info(running, "r")["disk_bytes"]
        assert {kind: shown[kind.replace("-", "_")] for kind in stored} == stored
        assert stored["set-aside"] > 0
        go_on(running, "r", ["a"], 1)
        assert set(damages(url).values()) == {""}


def test_a_rollback_whose_backup_fails_is_one_all_the_same(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with coordinator_thread(tmp_path / "data", blobs=url) as running:
        (a,) = crew(running, "r", ["a"], rounds=20, checkpoints=LONG)
        play_rounds(running, [a], range(3))
        with running.client() as admin, monkeypatch.context() as broken:
            broken.setattr(BucketBackups, "add", away)
            answer = admin.post("/v1/runs/r/rollback", json={"to": 1, "from_round": 3})
            assert (answer.status_code, "the store is away" in answer.text) == (503, True)
        assert info(running, "r")["round"] == 1
        go_on(running, "r", ["a"], 1)
    with coordinator_thread(tmp_path / "data", blobs=url) as running:
        go_on(running, "r", ["a"], 2)
        assert set(damages(url).values()) == {""}


# --- restoring one ----------------------------------------------------------------------------------------------------


def restored(url: str, data_dir: Path, number: int | None = None, warn: Callable[[str], object] = print) -> int:
    """Restore a backup; return its number. The operator still has the admin token."""
    manifest = restore(backups(url), number, Target(data_dir), warn)
    shutil.copy(data_dir.parent / "data" / "admin.token", data_dir)
    return manifest.number


def test_after_a_restart_the_files_of_earlier_backups_stay(url: str, tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data", blobs=url) as running:
        (a,) = crew(running, "r", ["a"], rounds=20, checkpoints=SHORT)
        play_rounds(running, [a], range(2))
        leave(a)
    with coordinator_thread(tmp_path / "data", blobs=url) as running:
        go_on(running, "r", ["a"], 2)
        assert sorted(states(url).values()) == [2, 2, 3], "one at the start, and one from before it"
        assert set(damages(url).values()) == {""}


@pytest.mark.in_sqlite
@pytest.mark.covers("reliability:restore-beside")
def test_a_new_machine_goes_on_from_the_bucket_alone(url: str, tmp_path: Path) -> None:
    play(url, tmp_path / "data", 3, LONG)
    restored(url, tmp_path / "new")
    shutil.rmtree(tmp_path / "data")
    with coordinator_thread(tmp_path / "new", blobs=url) as running:
        assert info(running, "r")["round"] == 3
        (event,) = events(running, "r", "restored-from-backup")
        assert "was restored. The run continues from round 3" in event["message"]
        go_on(running, "r", ["a"], 3)
        live = running.live("r")
        assert live.state is RunState.RUNNING
        assert set(damages(url).values()) == {""}


@pytest.mark.in_sqlite
def test_an_older_one_takes_the_run_back(url: str, tmp_path: Path) -> None:
    play(url, tmp_path / "data", 3)
    number = min(states(url))
    assert states(url)[number] == 1
    restored(url, tmp_path / "new", number)
    with coordinator_thread(tmp_path / "new", blobs=url) as running:
        assert info(running, "r")["round"] == 1
        assert rounds(running.live("r"), "checkpoints") == [1], "the newer ones were set aside"
        go_on(running, "r", ["a"], 1)
        assert set(damages(url).values()) == {""}


@pytest.mark.in_sqlite
@pytest.mark.covers("security:superseded-coordinator")
def test_the_coordinator_of_before_can_delete_nothing_and_make_no_backups(url: str, tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data", blobs=url) as old:
        (a,) = crew(old, "r", ["a"], rounds=20, checkpoints=SHORT)
        play_rounds(old, [a], [0])
        restored(url, tmp_path / "new")
        with coordinator_thread(tmp_path / "new", blobs=url) as new:
            before = dict(Objects(url).within(""))
            play_rounds(old, [a], [1])
            wait_until(lambda: len(events(old, "r", "backup-failed")) == 1)
            assert "belongs to another coordinator" in events(old, "r", "backup-failed")[0]["message"]
            with pytest.raises(StoreOutage, match="Stop this one"):
                old.live("r").blobs.delete("runs/r/checkpoints/1/0.x")
            assert before.items() <= dict(Objects(url).within("")).items()
            assert info(new, "r")["round"] == 1
    with pytest.raises(OuterstepError, match="it was restored there since, so do not start this one"):
        Coordinator(Settings(data_dir=tmp_path / "data", blobs=url))


@pytest.mark.in_sqlite
def test_of_two_copies_of_a_data_directory_the_second_is_told(url: str, tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data", blobs=url) as running:
        running.create_run('name = "r"\n[data]\nsource = "custom"\n[sync]\nrounds = 1\n')
        shutil.copytree(tmp_path / "data", tmp_path / "copy")
        refused = pytest.raises(OSError, match="another coordinator with a copy of this data directory has written")
        with coordinator_thread(tmp_path / "copy", blobs=url), refused:
            running.live("r").context.back_up()


def database_of(found: BucketBackups, number: int) -> str:
    """Return the name of the object with a backup's copy of the database."""
    (name,) = (name for name, _ in found.objects.within("database") if f"/{number}." in name and name.endswith(".zst"))
    return f"database/{name}"


def needs(url: str, number: int, folder: Path) -> set[str]:
    """Return the names of the blobs that a backup needs."""
    found, numbers = backups(url), itertools.count()
    manifest = found.manifest(number)
    copied = found.fetch_database(manifest, lambda: folder / f"{number}.{next(numbers)}")
    return {blob.name for blob in blobs_of(manifest, copied)}


def spoil_database(url: str, number: int, _: Path) -> None:
    objects = Objects(url)
    name = database_of(backups(url), number)
    content = objects.get(name)
    assert content is not None
    objects.delete([name])
    objects.create_from(name, content[0][:-9] + bytes(9))


def lose_checkpoint(url: str, number: int, folder: Path) -> None:
    own = needs(url, number, folder)
    others = {name for other in backups(url).numbers() if other != number for name in needs(url, other, folder)}
    Objects(url).delete([name for name in own - others if "/checkpoints/" in name])


@pytest.mark.parametrize("damage", [spoil_database, lose_checkpoint])
def test_a_damaged_one_is_named_and_an_older_one_restored(
    url: str, tmp_path: Path, damage: Callable[[str, int, Path], None]
) -> None:
    play(url, tmp_path / "data", 2)
    newest, *older = backups(url).numbers()
    damage(url, newest, tmp_path)
    assert [number for number, text in damages(url).items() if "missing" in text] == [newest]
    with pytest.raises(DamagedBackup, match="missing"):
        restore(backups(url), newest, Target(tmp_path / "new"))
    said: list[str] = []
    assert restored(url, tmp_path / "new", None, said.append) == older[0]
    assert len(said) == 1
    assert f"backup {newest} is damaged, trying an older one" in said[0]
    assert round_in(tmp_path / "new" / sqlite.FILE, "r") == 1


def test_a_database_that_unpacks_to_more_than_the_manifest_says_fills_no_disk(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(url, tmp_path / "data", 1)
    found, objects, written = backups(url), Objects(url), list[int]()
    manifest = found.manifest(max(found.numbers()))
    name = database_of(found, manifest.number)
    objects.delete([name])
    objects.create_from(name, zstandard.compress(bytes(manifest.database.size + (64 << 20))))
    real = files.Writer.write

    def write(self: files.Writer, data: Buffer) -> int:
        written.append(real(self, data))
        return written[-1]

    monkeypatch.setattr(files.Writer, "write", write)
    numbers = itertools.count()
    with pytest.raises(DamagedBackup, match="is missing or damaged"):
        found.fetch_database(manifest, lambda: tmp_path / str(next(numbers)))
    assert sum(written) <= manifest.database.size + READ_BYTES
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.in_sqlite
def test_two_restores_at_once_leave_one_owner(url: str, tmp_path: Path) -> None:
    play(url, tmp_path / "data", 1)
    first, second = backups(url), backups(url)
    restore(first, None, Target(tmp_path / "a"))
    with pytest.raises(OuterstepError, match="another restore has taken"):
        restore(second, None, Target(tmp_path / "b"))
    restored(url, tmp_path / "b")  # whoever repeats it does so knowingly
    with pytest.raises(OuterstepError, match="belongs to the coordinator of another database"):
        Coordinator(Settings(data_dir=tmp_path / "a", blobs=url))
    with coordinator_thread(tmp_path / "b", blobs=url) as running:
        assert read(running.live("r").blobs, min(needs(url, max(backups(url).numbers()), tmp_path)))
