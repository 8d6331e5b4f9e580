"""Backups of a coordinator that runs: what is in them, while retention deletes; which are kept; what damages them."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from coordinator.backup import directory
from coordinator.backup.contents import Content, DamagedBackup, content_of, copy_whole, encode
from coordinator.backup.directory import DirectoryBackups
from coordinator.backup.restore import Target, restore
from coordinator.store import sqlite
from coordinator.store.blobs import FileReader
from coordinator.store.payloads import READ_BYTES
from harness.coordinator import coordinator_thread
from harness.stores import names
from protocol.digest import digest
from protocol.errors import OuterstepError
from tests.coordinator.crew import assigned, crew, play_round, play_rounds, step_all
from tests.support.backing_up import back_up, blobs_in, check_restored, damages, files_in, restored, round_in

pytestmark = pytest.mark.in_directory

SHORT = "every_rounds = 1\nkeep = 1"  # what is deleted soonest


@pytest.mark.slow
def test_a_backup_has_what_the_rows_of_one_moment_need_and_the_run_is_as_it_was(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        a, b = crew(running, "r", ["a", "b"], rounds=4, checkpoints="every_rounds = 2\nkeep = 2")
        play_rounds(running, [a, b], range(2))
        assigned([a, b], 2)
        a.take_part(2)
        live = running.live("r")
        needed = {
            *names(live, "checkpoints"),
            *names(live, "deltas"),
            *names(live, "contributions", 2),  # in no delta yet
        }
        manifest = back_up(running.data_dir, tmp_path / "backups")
        assert files_in(tmp_path / "backups" / "1") == needed
        assert (manifest.number, manifest.lost) == (1, [])
        assert [(run.name, run.state, run.round) for run in manifest.runs] == [("r", "running", 2)]
        b.take_part(2)
        step_all([a, b], 2)
        play_rounds(running, [a, b], [3])
    restore(DirectoryBackups(tmp_path / "backups"), None, Target(tmp_path / "new"))
    check_restored(tmp_path / "new", tmp_path / "backups", 1)
    assert not (tmp_path / "new" / "admin.token").exists()


@pytest.mark.slow
def test_the_next_backup_copies_only_what_is_new(tmp_path: Path) -> None:
    root, copied = tmp_path / "backups", list[str]()
    with coordinator_thread(tmp_path / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=3, checkpoints="every_rounds = 2\nkeep = 5")
        play_rounds(running, [a], [0])
        back_up(running.data_dir, root, before_opening=copied.append)
        assert len(copied) == 2 + 2  # state 0 and one delta, of two fragments
        back_up(running.data_dir, root, before_opening=copied.append)
        assert len(copied) == 2 + 2
        play_rounds(running, [a], [1])
        back_up(running.data_dir, root, before_opening=copied.append)
    assert {blob.name for blob in blobs_in(root / "3")} == set(copied)
    assert len(copied) == 2 + 2 + 2 + 2
    for name in files_in(root / "1"):
        assert len({(root / number / name).stat().st_ino for number in "123"}) == 1, "linked"
    assert damages(DirectoryBackups(root)) == {1: "", 2: "", 3: ""}


@pytest.mark.slow
def test_a_disk_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "backups"
    with coordinator_thread(tmp_path / "data") as running:
        crew(running, "r", ["a"], rounds=3)
        running.await_state("r", 0)
        back_up(running.data_dir, root)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    back_up(tmp_path / "data", root)
    assert {(root / "2" / name).stat().st_nlink for name in files_in(root / "1")} == {1}
    monkeypatch.undo()
    assert damages(DirectoryBackups(root)) == {1: "", 2: ""}


@pytest.mark.slow
@pytest.mark.covers("reliability:consistent-backup")
def test_what_retention_deletes_in_the_middle_is_not_needed_by_a_newer_copy(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=9, checkpoints=SHORT)
        play_rounds(running, [a], [0])
        opened: list[str] = []

        def never_interrupt(name: str) -> None:
            opened.append(name)
            if len(opened) == 1:
                play_rounds(running, [a], range(1, 4))
                retained = {*names(running.live("r"), "checkpoints"), *names(running.live("r"), "deltas")}
                assert name not in retained

        manifest = back_up(running.data_dir, tmp_path / "backups", before_opening=never_interrupt)
        assert manifest.lost == []
        assert manifest.runs[0].round == 4
    found = files_in(tmp_path / "backups" / "1")
    assert found == {blob.name for blob in blobs_in(tmp_path / "backups" / "1")}, "nothing is left of the first copy"
    assert len(opened) > len(found)
    restore(DirectoryBackups(tmp_path / "backups"), None, Target(tmp_path / "new"))
    check_restored(tmp_path / "new", tmp_path / "backups", 1)
    assert round_in(tmp_path / "new" / "outerstep.db", "r") == 4


@pytest.mark.slow
@pytest.mark.covers("reliability:consistent-backup")
def test_backups_one_after_the_other_while_a_crew_trains_are_all_whole(tmp_path: Path) -> None:
    rounds = 12
    with coordinator_thread(tmp_path / "data") as running:
        members = crew(running, "r", ["a", "b"], rounds=rounds, checkpoints=SHORT)
        over = threading.Event()
        lost: list[str] = []

        def again_and_again() -> None:
            last = False
            while not last:
                last = over.is_set()
                lost.extend(back_up(running.data_dir, tmp_path / "backups", keep=1000).lost)

        thread = threading.Thread(target=again_and_again)
        thread.start()
        try:
            for round_ in range(rounds):  # the coordinator's state and retention may be behind
                play_round(members, round_)
            running.await_state("r", rounds)
        finally:
            over.set()
            thread.join()
    assert lost == []
    for number in DirectoryBackups(tmp_path / "backups").numbers():
        restore(DirectoryBackups(tmp_path / "backups"), number, Target(tmp_path / f"new-{number}"))
        check_restored(tmp_path / f"new-{number}", tmp_path / "backups", number)


@pytest.mark.slow
def test_a_backup_that_never_catches_up_ends_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "ATTEMPTS", 2)
    with coordinator_thread(tmp_path / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=9, checkpoints=SHORT)
        back_up(running.data_dir, tmp_path / "backups")

        def never_interrupt(name: str) -> None:
            round_ = running.live("r").round
            play_rounds(running, [a], [round_])

        play_rounds(running, [a], [0])
        with pytest.raises(OuterstepError, match="to a faster disk, or keep more checkpoints"):
            back_up(running.data_dir, tmp_path / "backups", before_opening=never_interrupt)
    assert damages(DirectoryBackups(tmp_path / "backups")) == {1: ""}


def test_what_the_coordinator_has_lost_itself_is_told_and_ends_no_backup(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=2)
        play_rounds(running, [a], [0])
        gone, spoilt = names(running.live("r"), "deltas", 0)
    # Not before: while it runs it may verify its blobs at any time, and make these again.
    (tmp_path / "data" / gone).unlink()
    content = bytearray((tmp_path / "data" / spoilt).read_bytes())
    content[-1] ^= 1
    (tmp_path / "data" / spoilt).write_bytes(content)
    manifest = back_up(tmp_path / "data", tmp_path / "backups")
    assert manifest.lost == sorted([gone, spoilt])
    assert damages(DirectoryBackups(tmp_path / "backups")) == {1: ""}, "as whole as it can be"


# --- which are kept ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_newest_stay_with_what_they_need_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "backups"
    with coordinator_thread(tmp_path / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=4, checkpoints=SHORT)
        for round_ in range(4):
            back_up(running.data_dir, root, keep=2)
            assert DirectoryBackups(root).numbers() == list(range(round_ + 1, max(round_ - 1, 0), -1))
            play_rounds(running, [a], [round_])
    assert damages(DirectoryBackups(root)) == {4: "", 3: ""}
    assert {path.name for path in root.iterdir()} == {"3", "4", "lock"}
    for number in "34":
        assert files_in(root / number) == {blob.name for blob in blobs_in(root / number)}


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A directory with backups 1, of state 0, and 2, of state 1, which share no checkpoint."""
    with coordinator_thread(tmp_path / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=2, checkpoints=SHORT)
        back_up(running.data_dir, tmp_path / "backups")
        play_rounds(running, [a], [0])
        back_up(running.data_dir, tmp_path / "backups")
    return tmp_path / "backups"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def only_in_2(root: Path) -> list[Path]:
    return sorted(root / "2" / name for name in files_in(root / "2") - files_in(root / "1"))


@pytest.mark.covers("reliability:damaged-backup")
def test_a_flipped_byte_of_a_blob_is_found_and_an_older_backup_restored(two: Path, tmp_path: Path) -> None:
    spoilt = only_in_2(two)[0]
    flip(spoilt)
    with pytest.raises(OuterstepError, match=f"{spoilt} is damaged"):
        restore(DirectoryBackups(two), 2, Target(tmp_path / "new"))
    assert not (tmp_path / "new" / "outerstep.db").exists()
    said: list[str] = []
    assert restore(DirectoryBackups(two), None, Target(tmp_path / "new"), said.append).number == 1
    assert said == [f"backup 2 is damaged, trying an older one: {spoilt} is damaged"]
    check_restored(tmp_path / "new", two, 1)


@pytest.mark.covers("reliability:damaged-backup")
def test_a_flipped_byte_of_the_database_or_the_manifest_is_found(two: Path, tmp_path: Path) -> None:
    flip(two / "2" / "outerstep.db")
    flip(two / "1" / "manifest.json")
    said: list[str] = []
    with pytest.raises(OuterstepError, match="every backup in"):
        restore(DirectoryBackups(two), None, Target(tmp_path / "new"), said.append)
    assert [text.partition(": ")[2] for text in said] == [
        f"{two / '2' / 'outerstep.db'} is damaged",
        "its manifest is not what was written",
    ]
    assert not (tmp_path / "new" / "outerstep.db").exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_a_blob_that_the_last_backup_has_not_whole_is_copied_anew(
    two: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    damage(only_in_2(two)[0])
    back_up(tmp_path / "data", two)
    assert [number for number, damage in damages(DirectoryBackups(two)).items() if damage] == [2]


def test_a_backup_of_another_number_is_none(two: Path, tmp_path: Path) -> None:
    with pytest.raises(OuterstepError, match="no backup 7 in .* has 2, 1"):
        restore(DirectoryBackups(two), 7, Target(tmp_path / "new"))
    (two / "2").rename(two / "7")
    with pytest.raises(DamagedBackup, match="is that of backup 2"):
        DirectoryBackups(two).manifest(7)


def alter(root: Path, number: int, change: Callable[[sa.Connection], object]) -> None:
    """Change a backup's database, and the manifest accordingly."""
    file = root / str(number) / sqlite.FILE
    engine = sa.create_engine(sqlite.url_in(file.parent))
    with engine.begin() as connection:
        change(connection)
    engine.dispose()
    manifest = DirectoryBackups(root).manifest(number).model_copy(update={"database": content_of(file)})
    (file.parent / "manifest.json").write_bytes(encode(manifest))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["..", "../../x", "/etc", ".x", "r/../x"])
def test_no_database_leads_out_of_the_data_directory(two: Path, tmp_path: Path, name: str) -> None:
    alter(two, 2, lambda connection: connection.execute(sa.text("UPDATE runs SET name = :name"), {"name": name}))
    with pytest.raises(OuterstepError, match="names files outside"):
        restore(DirectoryBackups(two), 2, Target(tmp_path / "new"))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_restore_needs_an_empty_directory(two: Path, tmp_path: Path) -> None:
    restored(two, tmp_path / "new")
    with pytest.raises(OuterstepError, match="new has a database already"):
        restore(DirectoryBackups(two), None, Target(tmp_path / "new"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").touch()
    with pytest.raises(OuterstepError, match="other is not empty, it has notes"):
        restore(DirectoryBackups(two), None, Target(tmp_path / "other"))


def test_a_directory_of_other_files_is_left_alone(two: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").touch()
    with pytest.raises(OuterstepError, match="home has other files than backups"):
        back_up(tmp_path / "data", tmp_path / "home")
    assert os.listdir(tmp_path / "home") == ["letter"]
    with pytest.raises(OuterstepError, match="not-mounted/deeper: no such file or directory"):
        back_up(tmp_path / "data", tmp_path / "not-mounted" / "deeper")


@pytest.mark.slow
def test_two_backups_at_once_in_one_directory_are_refused(two: Path, tmp_path: Path) -> None:
    with DirectoryBackups(two).locked(), pytest.raises(OuterstepError, match="another backup is being made"):
        back_up(tmp_path / "data", two)


def test_a_damaged_database_takes_the_place_of_no_backup(two: Path, tmp_path: Path) -> None:
    database = tmp_path / "data" / "outerstep.db"
    content = bytearray(database.read_bytes())
    content[4096 * 2 :] = bytes(len(content) - 4096 * 2)
    database.write_bytes(content)
    with pytest.raises(OuterstepError, match=r"outerstep\.db (is damaged|cannot be copied)"):
        back_up(tmp_path / "data", two, keep=1)
    assert damages(DirectoryBackups(two)) == {2: "", 1: ""}


def test_a_full_disk_leaves_what_was_there_and_the_next_one_goes_on(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(two / "2")  # so that there is something to copy
    real = os.fsync
    durable: list[int] = []

    def full(descriptor: int) -> None:
        if "/unfinished/copied" in os.readlink(f"/proc/self/fd/{descriptor}"):
            durable.append(descriptor)
            if len(durable) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OuterstepError, match="the disk of .*backups is full"):
            back_up(tmp_path / "data", two)
    assert damages(DirectoryBackups(two)) == {1: ""}
    copied: list[str] = []
    back_up(tmp_path / "data", two, before_opening=copied.append)
    assert len(copied) == len(only_in_2(two)) - 1
    assert damages(DirectoryBackups(two)) == {2: "", 1: ""}


def test_blobs_larger_than_a_read_are_copied_whole(tmp_path: Path) -> None:
    content = os.urandom(2 * READ_BYTES + 77)
    (tmp_path / "blob").write_bytes(content)
    with FileReader(tmp_path / "blob") as reader:
        whole = Content(digest=digest(content).hex(), size=len(content))
        assert copy_whole(reader.read_into, tmp_path / "copy", whole)
        assert not copy_whole(reader.read_into, tmp_path / "other", Content(digest=digest(b"").hex(), size=0))
    assert (tmp_path / "copy").read_bytes() == content
    assert not (tmp_path / "other").exists()
