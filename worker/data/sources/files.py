"""The files that `data.source` names on this machine, and which of them are held out."""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from blake3 import blake3

from worker.errors import DataError

PYTHON_STDLIB = "python-stdlib"

# Directories of the standard library that distributions leave out or add to; without them more machines agree.
_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BUILD_SPECIFIC = "_sysconfigdata"  # these describe the machine that Python was built on

Named = list[tuple[str, Path]]


def source_files(source: str) -> Named:
    """Return (relative name, path) of every file of `source`, in order of name. Raises DataError if there is none."""
    files = sorted(_python_stdlib() if source == PYTHON_STDLIB else _files(source))
    if not files:
        raise DataError(
            f"data.source = {source!r} names no files on this machine; name a directory or glob that does (a worker's "
            "--data, where this machine has them elsewhere)"
        )
    return files


def _python_stdlib() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for name, path in _walk(root, lambda directory: directory not in _SKIPPED_DIRECTORIES):
        if path.suffix == ".py" and not path.name.startswith(_BUILD_SPECIFIC):
            yield name, path


def _files(source: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of a directory, except hidden ones, or of a glob. Names are relative to the directory, or to the
    part of the glob that has no wildcards."""
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


def draw(content: bytes) -> float:
    """Return the draw, in [0, 1), by which `content` is held out: where it is below the share that is wanted."""
    return int.from_bytes(blake3(content).digest()[:8], "little") / 2**64


def held_out_names(names: Iterable[str], holdout: float) -> set[str]:
    """Return those of several files that are held out: at least one, that of the smallest draw, unless `holdout` is 0.

    By name, so that every worker holds out the same ones, whatever tokenizer reads them.
    """
    if holdout == 0:
        return set()
    draws = {name: draw(name.encode()) for name in names}
    limit = max(holdout, np.nextafter(min(draws.values()), 1))
    return {name for name in draws if draws[name] < limit}
