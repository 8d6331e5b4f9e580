"""A folder that a start finds may not be durable: the process that made it may have died before its fsync."""

import errno
from pathlib import Path

import pytest

from coordinator.store import files
from coordinator.store.files import RunFiles, place


def test_what_is_put_into_a_folder_that_was_found_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by simulation seed 146: kill -9 between mkdir and fsync of a round's folder; after the restart a contribution
    was acknowledged in it; then the power went, and the folder with it."""
    root = tmp_path / "runs" / "r"
    RunFiles(root)
    (root / "contributions" / "1").mkdir()
    durable: list[Path] = []
    monkeypatch.setattr(files, "fsync", durable.append)
    upload = tmp_path / "upload"
    upload.write_bytes(b"bytes")
    run_files = RunFiles(root)
    final = run_files.contribution(1, 0, "w", bytes(32))
    place(upload, final)
    assert root / "contributions" in durable, "the folder of the round"
    assert final.parent in durable, "the file"


def test_a_folder_whose_fsync_failed_is_not_taken_for_durable_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by simulation seed 121: the disk was full as a round's folder was made; when there was room again a
    contribution was acknowledged in it; then the power went, and the folder with it."""
    root = tmp_path / "runs" / "r"
    run_files = RunFiles(root)
    durable: list[Path] = []
    full = True

    def fsync(path: Path) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        durable.append(path)

    monkeypatch.setattr(files, "fsync", fsync)
    upload = tmp_path / "upload"
    upload.write_bytes(b"bytes")
    final = run_files.contribution(1, 0, "w", bytes(32))
    with pytest.raises(OSError, match="No space"):
        place(upload, final)
    assert upload.exists()
    full = False
    place(upload, final)
    assert root / "contributions" in durable, "the folder of the round"
    assert final.read_bytes() == b"bytes"
