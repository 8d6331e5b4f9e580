"""Backups of a coordinator that runs: what is in them, while retention deletes; which are kept; what damages them."""

import errno
import os
import threading
from pathlib import Path

import pytest

from coordinator.backup import create as creating
from coordinator.backup.contents import copy_whole
from coordinator.backup.create import superseded
from coordinator.backup.directory import BackupDirectory, existing
from coordinator.backup.manifest import Blob, Content, Manifest, decode, encode
from coordinator.backup.restore import Target, restore
from coordinator.store.blobs import FileReader
from coordinator.store.payloads import READ_BYTES
from harness.coordinator import InThread, coordinator_thread
from harness.stores import names
from protocol.digest import digest
from protocol.errors import OuterstepError
from tests.coordinator.crew import crew, play_round
from tests.support.backing_up import back_up, blobs_in, check_restored, damages, restored, round_in

pytestmark = pytest.mark.in_directory

SHORT = "every_rounds = 1\nkeep = 1"  # what is deleted soonest


def settled(running: InThread, round_: int) -> None:
    """Return once the coordinator has stepped, and deleted what it does not keep."""
    running.await_state("r", round_)


def test_a_backup_has_what_the_rows_of_one_moment_need_and_the_run_is_as_it_was(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        a, b = crew(running, "r", ["a", "b"], rounds=4, checkpoints="every_rounds = 2\nkeep = 2")
        for round_ in range(2):
            play_round([a, b], round_)
        settled(running, 2)
        for member in (a, b):
            member.assignment(2)
        a.take_part(2)
        live = running.live("r")
        needed = {
            *names(live, "checkpoints"),
            *names(live, "deltas"),
            *names(live, "contributions", 2),  # in no delta yet
        }
        manifest = back_up(running.data_dir, tmp_path / "backups").manifest
        assert {blob.name for blob in manifest.blobs} == needed
        assert (manifest.number, manifest.lost) == (1, [])
        assert [(run.name, run.state, run.round) for run in manifest.runs] == [("r", "running", 2)]
        b.take_part(2)
        for member in (a, b):
            member.step(2)
        play_round([a, b], 3)
        settled(running, 4)
    check_restored(tmp_path / "new", restore(BackupDirectory(tmp_path / "backups"), None, Target(tmp_path / "new")))
    assert not (tmp_path / "new" / "admin.token").exists()


def test_a_coordinator_need_not_run(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=2)
        play_round([a], 0)
        settled(running, 1)
    made = back_up(tmp_path / "data", tmp_path / "backups")
    check_restored(
        tmp_path / "new",
        restored_manifest := restore(BackupDirectory(tmp_path / "backups"), 1, Target(tmp_path / "new")),
    )
    assert restored_manifest == made.manifest


def test_the_next_backup_copies_only_what_is_new(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=3, checkpoints="every_rounds = 2\nkeep = 5")
        play_round([a], 0)
        settled(running, 1)
        first = back_up(running.data_dir, tmp_path / "backups")
        assert first.copied_blobs == len(first.manifest.blobs) == 2 + 2  # state 0 and one delta, of two fragments
        again = back_up(running.data_dir, tmp_path / "backups")
        assert (again.copied_blobs, again.copied_bytes) == (0, 0)
        play_round([a], 1)
        settled(running, 2)
        second = back_up(running.data_dir, tmp_path / "backups")
        new = {blob.digest for blob in second.manifest.blobs} - {blob.digest for blob in first.manifest.blobs}
        assert second.copied_blobs == len(new) == 2 + 2
        assert second.copied_bytes == sum(blob.size for blob in second.manifest.blobs if blob.digest in new)
    assert damages(tmp_path / "backups") == {1: "", 2: "", 3: ""}


@pytest.mark.covers("reliability:consistent-backup")
def test_what_retention_deletes_in_the_middle_is_not_needed_by_a_newer_copy(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=9, checkpoints=SHORT)
        play_round([a], 0)
        settled(running, 1)
        opened: list[str] = []

        def never_interrupt(name: str) -> None:
            opened.append(name)
            if len(opened) == 1:
                for round_ in range(1, 4):
                    play_round([a], round_)
                settled(running, 4)
                retained = {*names(running.live("r"), "checkpoints"), *names(running.live("r"), "deltas")}
                assert name not in retained

        manifest = back_up(running.data_dir, tmp_path / "backups", before_opening=never_interrupt).manifest
        assert manifest.lost == []
        assert manifest.runs[0].round == 4
        assert len(opened) > len(manifest.blobs)
    check_restored(tmp_path / "new", restore(BackupDirectory(tmp_path / "backups"), None, Target(tmp_path / "new")))
    assert round_in(tmp_path / "new" / "outerstep.db", "r") == 4


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
                lost.extend(back_up(running.data_dir, tmp_path / "backups", keep=1000).manifest.lost)

        thread = threading.Thread(target=again_and_again)
        thread.start()
        try:
            for round_ in range(rounds):
                play_round(members, round_)
            settled(running, rounds)
        finally:
            over.set()
            thread.join()
    found = damages(tmp_path / "backups")
    assert (set(found.values()), lost) == ({""}, [])
    for number in found:
        manifest = restore(BackupDirectory(tmp_path / "backups"), number, Target(tmp_path / f"new-{number}"))
        check_restored(tmp_path / f"new-{number}", manifest)


def test_a_backup_that_never_catches_up_ends_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(creating, "ATTEMPTS", 2)
    with coordinator_thread(tmp_path / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=9, checkpoints=SHORT)
        back_up(running.data_dir, tmp_path / "backups")

        def never_interrupt(name: str) -> None:
            round_ = running.live("r").round
            play_round([a], round_)
            settled(running, round_ + 1)

        play_round([a], 0)
        settled(running, 1)
        with pytest.raises(OuterstepError, match="to a faster disk, or keep more checkpoints"):
            back_up(running.data_dir, tmp_path / "backups", before_opening=never_interrupt)
    assert damages(tmp_path / "backups") == {1: ""}


def test_what_the_coordinator_has_lost_itself_is_told_and_ends_no_backup(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=2)
        play_round([a], 0)
        settled(running, 1)
        gone, spoilt = names(running.live("r"), "deltas", 0)
    # Not before: while it runs it may verify its blobs at any time, and make these again.
    (tmp_path / "data" / gone).unlink()
    content = bytearray((tmp_path / "data" / spoilt).read_bytes())
    content[-1] ^= 1
    (tmp_path / "data" / spoilt).write_bytes(content)
    manifest = back_up(tmp_path / "data", tmp_path / "backups").manifest
    assert manifest.lost == sorted([gone, spoilt])
    assert damages(tmp_path / "backups") == {1: ""}, "as whole as it can be"


# --- which are kept ---------------------------------------------------------------------------------------------------


def test_the_newest_stay_with_what_they_need_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "backups"
    with coordinator_thread(tmp_path / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=4, checkpoints=SHORT)
        manifests: list[Manifest] = []
        for round_ in range(4):
            made = back_up(running.data_dir, root, keep=2)
            manifests.append(made.manifest)
            assert made.removed == ([round_ - 1] if round_ > 1 else [])
            play_round([a], round_)
            settled(running, round_ + 1)
    assert damages(root) == {4: "", 3: ""}
    assert blobs_in(root) == {blob.digest for manifest in manifests[2:] for blob in manifest.blobs}
    assert {path.name for path in (root / "backups").iterdir()} == {"3.json", "3.db", "4.json", "4.db"}


def test_where_a_manifest_cannot_be_read_no_blob_goes(tmp_path: Path) -> None:
    root = tmp_path / "backups"
    with coordinator_thread(tmp_path / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=3, checkpoints=SHORT)
        back_up(running.data_dir, root)
        before = blobs_in(root)
        (root / "backups" / "1.json").write_text("of a later version, say")
        for round_ in range(2):
            play_round([a], round_)
            settled(running, round_ + 1)
            back_up(running.data_dir, root, keep=1)
    assert before < blobs_in(root)
    assert damages(root) == {3: "", 1: "its manifest is not what was written"}


@pytest.mark.parametrize(
    ("numbers", "keep", "gone"), [([], 1, []), ([3, 1, 2], 3, []), ([10, 9, 2], 2, [2]), ([1, 2, 3], 1, [2, 1])]
)
def test_all_but_the_newest_are_superseded(numbers: list[int], keep: int, gone: list[int]) -> None:
    assert superseded(numbers, keep) == gone


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A directory with backups 1, of state 0, and 2, of state 1, which share no checkpoint."""
    with coordinator_thread(tmp_path / "data") as running:
        (a,) = crew(running, "r", ["a"], rounds=2, checkpoints=SHORT)
        back_up(running.data_dir, tmp_path / "backups")
        play_round([a], 0)
        settled(running, 1)
        back_up(running.data_dir, tmp_path / "backups")
    return tmp_path / "backups"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def only_in_2(root: Path) -> list[Path]:
    first, second = ({blob.digest for blob in BackupDirectory(root).manifest(n).blobs} for n in (1, 2))
    return sorted(root / "blobs" / digest for digest in second - first)


@pytest.mark.covers("reliability:damaged-backup")
def test_a_flipped_byte_of_a_blob_is_found_and_an_older_backup_restored(two: Path, tmp_path: Path) -> None:
    spoilt = only_in_2(two)[0]
    flip(spoilt)
    told = damages(two)
    assert str(spoilt) in told[2]
    assert told[1] == ""
    with pytest.raises(OuterstepError, match=f"{spoilt} is damaged"):
        restore(BackupDirectory(two), 2, Target(tmp_path / "new"))
    assert not (tmp_path / "new" / "outerstep.db").exists()
    said: list[str] = []
    manifest = restore(BackupDirectory(two), None, Target(tmp_path / "new"), said.append)
    assert manifest.number == 1
    assert said == [f"backup 2 is damaged, trying an older one: {spoilt} is damaged"]
    check_restored(tmp_path / "new", manifest)


@pytest.mark.covers("reliability:damaged-backup")
def test_a_flipped_byte_of_the_database_or_the_manifest_is_found(two: Path, tmp_path: Path) -> None:
    flip(two / "backups" / "2.db")
    flip(two / "backups" / "1.json")
    assert damages(two) == {
        2: f"{two / 'backups' / '2.db'} is missing or damaged",
        1: "its manifest is not what was written",
    }
    with pytest.raises(OuterstepError, match="every backup in"):
        restore(BackupDirectory(two), None, Target(tmp_path / "new"))
    assert not (tmp_path / "new" / "outerstep.db").exists()


def test_a_damaged_blob_that_is_deleted_is_copied_anew(two: Path, tmp_path: Path) -> None:
    spoilt = only_in_2(two)[0]
    flip(spoilt)
    spoilt.unlink()
    assert back_up(tmp_path / "data", two).copied_blobs == 1
    assert damages(two) == {3: "", 2: "", 1: ""}


def test_a_cut_blob_is_copied_anew(two: Path, tmp_path: Path) -> None:
    cut = only_in_2(two)[0]
    cut.write_bytes(cut.read_bytes()[:-1])
    assert back_up(tmp_path / "data", two).copied_blobs == 1
    assert set(damages(two).values()) == {""}


@pytest.mark.parametrize("name", ["../admin.token", "runs/../../x", "/etc/passwd", "runs/r/../x", "runs//x", "other/x"])
def test_no_manifest_leads_out_of_the_data_directory(name: str) -> None:
    content = Content(digest="0" * 64, size=0)
    blob = Blob.model_construct(name=name, digest="0" * 64, size=0)
    made = Manifest.model_construct(
        format=1, number=1, made_at=0.0, version="0", runs=[], database=content, blobs=[blob], lost=[]
    )
    with pytest.raises(ValueError, match="later version"):
        decode(encode(made))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_restore_needs_an_empty_directory(two: Path, tmp_path: Path) -> None:
    restored(two, tmp_path / "new")
    with pytest.raises(OuterstepError, match="new has a database already"):
        restore(BackupDirectory(two), None, Target(tmp_path / "new"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").touch()
    with pytest.raises(OuterstepError, match="other is not empty, it has notes"):
        restore(BackupDirectory(two), None, Target(tmp_path / "other"))


def test_where_no_backup_is_it_says_so(two: Path, tmp_path: Path) -> None:
    with pytest.raises(OuterstepError, match="there is no directory .*none"):
        existing(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(OuterstepError, match="there is no backup in .*empty"):
        existing(tmp_path / "empty")
    with pytest.raises(OuterstepError, match="no backup 7 in .* has 2, 1"):
        restore(BackupDirectory(two), 7, Target(tmp_path / "new"))


def test_a_directory_of_other_files_is_left_alone(two: Path, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").touch()
    with pytest.raises(OuterstepError, match="home has other files than backups"):
        back_up(tmp_path / "data", tmp_path / "home")
    assert os.listdir(tmp_path / "home") == ["letter"]
    with pytest.raises(OuterstepError, match="not-mounted/deeper: no such file or directory"):
        back_up(tmp_path / "data", tmp_path / "not-mounted" / "deeper")


def test_two_backups_at_once_in_one_directory_are_refused(two: Path, tmp_path: Path) -> None:
    with BackupDirectory(two).locked(), pytest.raises(OuterstepError, match="another backup is being made"):
        back_up(tmp_path / "data", two)


def test_a_damaged_database_takes_the_place_of_no_backup(two: Path, tmp_path: Path) -> None:
    database = tmp_path / "data" / "outerstep.db"
    content = bytearray(database.read_bytes())
    content[4096 * 2 :] = bytes(len(content) - 4096 * 2)
    database.write_bytes(content)
    with pytest.raises(OuterstepError, match=r"outerstep\.db (is damaged|cannot be copied)"):
        back_up(tmp_path / "data", two, keep=1)
    assert damages(two) == {2: "", 1: ""}


def test_a_full_disk_leaves_what_was_there_and_the_next_one_goes_on(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in only_in_2(two):
        path.unlink()  # so that there is something to copy
    real = os.fsync
    durable: list[int] = []

    def full(descriptor: int) -> None:
        if "/incoming/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            durable.append(descriptor)
            if len(durable) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OuterstepError, match="the disk of .*backups is full"):
            back_up(tmp_path / "data", two)
    assert damages(two)[1] == ""
    rest = len(only_in_2(two)) - 1
    assert back_up(tmp_path / "data", two).copied_blobs == rest
    assert set(damages(two).values()) == {""}


def test_blobs_larger_than_a_read_are_copied_whole(tmp_path: Path) -> None:
    content = os.urandom(2 * READ_BYTES + 77)
    (tmp_path / "blob").write_bytes(content)
    with FileReader(tmp_path / "blob") as reader:
        assert copy_whole(reader, tmp_path / "copy", digest(content).hex())
        assert not copy_whole(reader, tmp_path / "other", digest(b"").hex())
    assert (tmp_path / "copy").read_bytes() == content
    assert not (tmp_path / "other").exists()
