"""The files that `data.source` names on this machine, which of them are held out, and whether they contain text."""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from blake3 import blake3

from worker.errors import DataError

PYTHON_STDLIB = "python-stdlib"

# Directories of the standard library that distributions leave out or add to. Without them more machines agree.
_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BUILD_SPECIFIC = "_sysconfigdata"  # these files describe the machine that Python was built on

NamedFiles = list[tuple[str, Path]]


def source_files(source: str) -> NamedFiles:
    """Return (relative name, path) of every file of `source`, sorted by name. Raises DataError if there are none."""
    files = sorted(_python_stdlib() if source == PYTHON_STDLIB else _files(source))
    if not files:
        raise DataError(
            f"data.source = {source!r} matches no files on this machine; name a directory or glob that does (with a "
            "worker's --data if this machine has them elsewhere)"
        )
    return files


def _python_stdlib() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for name, path in _walk(root, lambda directory: directory not in _SKIPPED_DIRECTORIES):
        if path.suffix == ".py" and not path.name.startswith(_BUILD_SPECIFIC):
            yield name, path


def _files(source: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of a directory, except hidden ones, or of a glob. Names are relative to the directory, or to the
    part of the glob without wildcards."""
    expanded = Path(source).expanduser()
    if expanded.is_dir():
        yield from _walk(expanded, lambda directory: not directory.startswith("."))
        return
    fixed = Path(expanded.anchor)
    for part in expanded.parts[len(fixed.parts) : -1]:
        if glob.has_magic(part):
            break
        fixed /= part
    for match in glob.glob(str(expanded), recursive=True):
        path = Path(match)
        if path.is_file():
            yield path.relative_to(fixed).as_posix(), path


def _walk(root: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Path]]:
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = filter(wanted, subdirectories)
        for name in names:
            path = Path(directory, name)
            if not name.startswith(".") and path.is_file():
                yield path.relative_to(root).as_posix(), path


# --- held out -----------------------------------------------------------------------------------------------------


def draw(content: bytes) -> float:
    """Return a number in [0, 1) derived from `content`. It is held out if the number is below the wanted share."""
    return int.from_bytes(blake3(content).digest()[:8], "little") / 2**64


def held_out_names(names: Iterable[str], holdout: float) -> set[str]:
    """Return which of several files are held out: at least one, the one with the smallest draw, unless `holdout` is 0.

    Decided by name, so that every worker holds out the same files, whatever its tokenizer.
    """
    if holdout == 0:
        return set()
    draws = {name: draw(name.encode()) for name in names}
    limit = max(holdout, np.nextafter(min(draws.values()), 1))
    return {name for name in draws if draws[name] < limit}


def changed(path: object) -> DataError:
    """Return the error for a file whose length changed while it was read."""
    return DataError(f"{path} changed while it was being read; stop whatever writes to it, and start again")


# --- text by its name but not by its content ----------------------------------------------------------------------
# A compressed file or an image named .txt can be trained on as bytes without anybody noticing.

_HEAD_BYTES = 8000  # as many as git checks for a NUL

_UNPACK = "unpack it, or rename it to end in .txt or .jsonl followed by .gz or .zst"
_ALONE = "select the text files only, as in DIR/*.txt"
_BEGINNINGS: dict[bytes, tuple[str, str]] = {
    b"\x1f\x8b": ("compressed by gzip", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", _UNPACK),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"\xfd7zXZ\x00": ("compressed by xz", "unpack it"),
    **{b"BZh%d1AY&SY" % level: ("compressed by bzip2", "unpack it") for level in range(1, 10)},
    b"PAR1": ("parquet", "rename it to end in .parquet"),
    b"\x89PNG\r\n": ("a PNG image", _ALONE),
    b"\xff\xd8\xff": ("a JPEG image", _ALONE),
    b"GIF87a": ("a GIF image", _ALONE),
    b"GIF89a": ("a GIF image", _ALONE),
    b"%PDF-": ("a PDF document", _ALONE),
}
_BINARY = ("binary: it contains a NUL byte", _ALONE)


def check_text(source: str, files: NamedFiles) -> None:
    """Raise DataError for a file whose beginning is not text. Raises OSError if one cannot be read."""
    for name, path in files:
        found = _not_text(path)
        if found is not None:
            what, remedy = found
            raise DataError(f"data.source = {source!r}: {name} is not text but {what}; {remedy}")


def _not_text(path: Path) -> tuple[str, str] | None:
    """Return what the file is instead of text, and the remedy; None if it looks like text."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    for beginning, found in _BEGINNINGS.items():
        if head.startswith(beginning):
            return found
    return _BINARY if b"\0" in head else None
