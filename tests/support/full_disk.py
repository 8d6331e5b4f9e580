"""A disk that is full when a test says so: a real small one where this machine lets us mount it, else a pretended one.

A pretended full disk fails every call that needs room, as the kernel and SQLite do: that way each single write of the
product can be the one that fails.
"""

import errno
import os
import pathlib
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from tests.support.crash_points import Changes, caller, kind

ROOM_BYTES = 8 << 20


class FullDisk:
    """Asked before each write below `root`. `is_full` says of a write, by its name, whether it fails: what is written
    and in which function of the product."""

    def __init__(self, root: Path, is_full: Callable[[str], bool]) -> None:
        self.names: list[str] = []
        self._root, self._is_full = str(root), is_full
        self._changes = Changes()
        self._lock = threading.Lock()

    def write(self, what: str) -> bool:
        name = f"{what} in {caller()}"
        with self._lock:
            self.names.append(name)
            return self._is_full(name)

    def check(self, what: str, path: Any) -> None:
        where = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fspath(path)
        if where.startswith(self._root) and self.write(f"{what} {kind(where, self._root)}"):
            raise OSError(errno.ENOSPC, "No space left on device", where)

    def wrap(self, patch: pytest.MonkeyPatch, name: str, argument: int) -> None:
        original = getattr(os, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.check(name, args[argument])
            return original(*args, **kwargs)

        patch.setattr(os, name, wrapped)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name, argument in (
            ("fsync", 0),
            ("pwrite", 0),
            ("ftruncate", 0),
            ("replace", 1),
            ("link", 1),
            ("mkdir", 0),
        ):
            self.wrap(patch, name, argument)
        opened = pathlib.Path.open

        def open_(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("xwa"):
                return opened(path, mode, *args, **kwargs)
            self.check("open", path)
            return _File(opened(path, mode, *args, **kwargs), lambda: self.check("write", path))

        patch.setattr(pathlib.Path, "open", open_)

    def watch(self, engine: sa.Engine) -> None:
        """Changes and commits of the database are writes too."""
        self._changes.watch(engine)

        @sa.event.listens_for(engine, "before_cursor_execute")
        def _change(_: Any, __: Any, statement: str, *___: Any) -> None:
            if statement.split()[0] in ("INSERT", "UPDATE", "DELETE"):
                self._check_database(statement, " ".join(statement.split()[1:3]))

        @sa.event.listens_for(engine, "commit")
        def _commit(_: Any) -> None:
            self._check_database("COMMIT", f"of {self._changes}")

    def _check_database(self, statement: str, what: str) -> None:
        if self.write(f"{statement.split()[0]} {what}"):
            fault = sqlite3.OperationalError("database or disk is full")
            fault.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise OperationalError(statement, None, fault)


class _File:
    def __init__(self, file: Any, check: Callable[[], None]) -> None:
        self._file, self._check = file, check

    def write(self, data: Any) -> int:
        self._check()
        return int(self._file.write(data))

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class SmallDisk:
    """A directory on a disk with a little room. `watch` is for the pretended one."""

    def __init__(self, root: Path, *, real: bool, patch: pytest.MonkeyPatch) -> None:
        self.root, self.real = root, real
        self._full = False
        self._disk = FullDisk(root, lambda _: self._full)
        if not real:
            self._disk.install(patch)

    def watch(self, engine: sa.Engine) -> None:
        if not self.real:
            self._disk.watch(engine)

    def fill(self) -> None:
        self._full = True
        if self.real:
            with (self.root / "ballast").open("wb", buffering=0) as file:
                for size in (1 << 16, 1):
                    with suppress(OSError):
                        while True:
                            file.write(bytes(size))

    def make_room(self) -> None:
        self._full = False
        if self.real:
            (self.root / "ballast").unlink()


@contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={ROOM_BYTES}", "tmpfs", str(folder)]
    real = os.geteuid() == 0 and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        with pytest.MonkeyPatch.context() as patch:
            yield SmallDisk(folder, real=real, patch=patch)
    finally:
        if real:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
