"""Files written past the page cache hold what was written, on every file system and whatever its length."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from outerstep.common.connections import error_text
from outerstep.common.files import LEAST_BYTES, NEW, PAGE_BYTES, Sink, Writer, aligned, naming, replace_file, write_new

SIZES = [0, 1, PAGE_BYTES + 1, LEAST_BYTES - 1, LEAST_BYTES, LEAST_BYTES + 1, LEAST_BYTES + 3 * PAGE_BYTES - 1]


def content(size: int) -> memoryview:
    memory = aligned(size)
    memory[:] = os.urandom(size)
    return memory


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("beyond", [0, 1])
def test_what_is_written_is_there(tmp_path: Path, size: int, beyond: int) -> None:
    """Memory that is not aligned takes the way through the cache."""
    written = content(size + beyond)[beyond:]
    write_new(tmp_path / "file", written)
    assert (tmp_path / "file").read_bytes() == written
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "file", written)


def test_a_file_system_that_does_not_know_it_is_written_as_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, o_direct = os.open, getattr(os, "O_DIRECT", 0)

    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        descriptor = opened(path, flags & ~o_direct, mode)  # as some do: made, and then refused
        if flags & o_direct:
            os.close(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return descriptor

    monkeypatch.setattr(os, "open", refuse)
    written = content(2_000_001)
    write_new(tmp_path / "file", written)
    assert (tmp_path / "file").read_bytes() == written


def test_writes_that_end_early_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda descriptor, data, at: pwrite(descriptor, data[: max(1, len(data) // 3)], at)
    )
    written = content(2_000_001)
    write_new(tmp_path / "file", written)
    assert (tmp_path / "file").read_bytes() == written


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pieces", [1, 7])
def test_a_writer_takes_it_piece_by_piece_and_what_was_there_goes(tmp_path: Path, size: int, pieces: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(2 * LEAST_BYTES))
    written = os.urandom(size)
    with Writer(path, 0o600) as file:
        for part in range(pieces):
            piece = written[size * part // pieces : size * (part + 1) // pieces]
            assert file.write(piece) == len(piece)
            file.flush()
        file.end()
    assert path.read_bytes() == written


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), ValueError("I/O error: Input/output error (os error 5)")]
)
def test_errors_of_open_files_name_the_file(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(OSError, match=r"file") as raised, naming(tmp_path / "file"):
        raise error
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(tmp_path / "file"))
    assert error_text(raised.value) == f"{tmp_path}/file: input/output error"


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no number"), naming(tmp_path):
        raise ValueError("no number")
    with pytest.raises(FileNotFoundError, match="other"), naming(tmp_path):
        (tmp_path / "other").read_bytes()


def test_a_replacement_does_not_overwrite_a_file_that_an_interrupted_rename_has_left_under_both_names(
    tmp_path: Path,
) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"old")
    path.with_name(path.name + NEW).hardlink_to(path)

    def fail(file: Sink) -> None:
        file.write(b"new")
        raise OSError("the power fails")

    with pytest.raises(OSError, match="power"):
        replace_file(path, fail)
    assert path.read_bytes() == b"old"
    replace_file(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new"
