"""The files that `data.source` names on this machine, and which of them are held out."""

import glob
import os
import shlex
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from blake3 import blake3

from outerstep.common.connections import error_text
from worker.errors import DataError

PYTHON_STDLIB = "python-stdlib"

# Directories of the standard library that distributions leave out or add to. Without them more machines agree.
_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_BUILD_SPECIFIC = "_sysconfigdata"  # these files describe the machine that Python was built on

_FAR = 3  # times the share that was asked for, or a third of it, is noted
_ONE = 1.25  # times the share of one document of equal ones is not

NamedFiles = list[tuple[str, Path]]


def source_files(source: str) -> NamedFiles:
    """Return (relative name, path) of every file of `source`, sorted by name. Links are followed. Raises DataError if
    there are no files, for a link that leads nowhere, and for a directory that cannot be read."""
    try:
        files = sorted(_python_stdlib() if source == PYTHON_STDLIB else _files(source))
    except OSError as error:
        raise DataError(f"data.source = {source!r}: {error_text(error)}") from error
    if not files:
        raise DataError(
            f"data.source = {source!r} matches no files on this machine; name a directory or glob that does (with a "
            "worker's --data if this machine has them elsewhere)"
        )
    return files


def _python_stdlib() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_path("stdlib"))
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [each for each in subdirectories if each not in _SKIPPED_DIRECTORIES]
        for path in (Path(directory, name) for name in names if not name.startswith((".", _BUILD_SPECIFIC))):
            if path.suffix == ".py" and path.is_file():
                yield path.relative_to(root).as_posix(), path


def _files(source: str) -> set[tuple[str, Path]]:
    """Return the files of a directory, except hidden ones, or of a glob. Names are relative to the directory, or to the
    part of the glob without wildcards."""
    expanded = Path(source).expanduser()
    root = expanded
    patterns: Sequence[str] = ("**",)
    if not expanded.is_dir():
        parts = expanded.parts
        fixed = next((at for at, part in enumerate(parts[:-1]) if glob.has_magic(part)), len(parts) - 1)
        root, patterns = Path(*parts[:fixed]), parts[fixed:]
    return {(path.relative_to(root).as_posix(), path) for path in _matches(root, patterns, frozenset())}


def _matches(directory: Path, patterns: Sequence[str], inside: frozenset[str]) -> Iterator[Path]:
    """Yield the files below a directory whose path matches one pattern per part; `**` matches any directories. No
    wildcard matches a leading dot. A link to a directory is followed, unless the link is itself below that directory:
    `inside` has the real paths of the directories that lead here. Raises DataError for a link that leads nowhere."""
    real = os.path.realpath(directory)
    if real in inside or not directory.is_dir():
        return
    first, rest = patterns[0], patterns[1:]
    if first == "**" and rest:
        yield from _matches(directory, rest, inside)
    literal = not glob.has_magic(first)
    for name in [first] if literal else os.listdir(directory):
        hidden = name.startswith(".") and not first.startswith(".")
        if hidden or not (literal or fnmatchcase(name, first)):
            continue
        path = directory / name
        if path.is_dir():
            if first == "**" or rest:
                yield from _matches(path, patterns if first == "**" else rest, inside | {real})
        elif path.is_symlink() and not path.exists():
            raise DataError(f"{path} is a link to {os.readlink(path)}, which does not exist; fix or remove the link")
        elif not rest and path.is_file():
            yield path


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


def holdout_note(held_out: int, training: int, asked: float | None, documents: int | None) -> str | None:
    """Return a sentence if the share of held-out tokens is far from the one that was `asked` for, or above a half if
    that is unknown (None); otherwise None.

    Documents are held out as a whole, however long they are. So one of a few `documents` of the same size is no reason
    for a note. None: their number is unknown.
    """
    share = held_out / max(held_out + training, 1)
    if asked is None:
        return f"{share:.1%} of the tokens are held out, more than are trained on" if share > 0.5 else None
    most = max(asked * _FAR, _ONE / documents if documents else 0)
    if not held_out or asked / _FAR <= share <= most:
        return None
    return (
        f"{share:.1%} of the tokens are held out, not {asked:.1%}: documents are held out as a whole, also text files, "
        "and differ much in size; of .bin files, the end of the last one is. Split the large ones, or choose what is "
        "held out with `outerstep data prepare --held-out`"
    )


def python_command(code: str) -> str:
    """Return the shell command that runs this code, for messages."""
    return f"python -c {shlex.quote(code)}" if set(code) & set('"$`!') else f'python -c "{code}"'


def changed(path: object) -> DataError:
    """Return the error for a file whose length changed while it was read."""
    return DataError(f"{path} changed while it was being read; stop whatever writes to it, and start again")
