"""Crash points: the instants before and after everything that changes what is on disk, and a kill -9 at one of them.

Nothing of this is in the product. A process under test is started through here: it is forked from one that has
imported everything, so that dying eighty times is quick. What makes a change durable (fsync, rename, link, commit and
the like) is wrapped, and every call of it is two points, named by what is done, to what, and by which module and public
function of the product. So no operation can be forgotten: whatever the product does, the trace of an undisturbed run
names it.

Linux only (/proc). A SIGKILL takes the process and leaves the kernel's page cache. What a power cut takes besides, the
simulation shows.
"""

import inspect
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FrameType
from typing import Any

import sqlalchemy as sa

from tests.support.forks import START

# Passed through by whoever the call is made for.
_THROUGH = (
    *("coordinator.store.blobs", "coordinator.store.directory_blobs"),
    *("coordinator.store.database", "coordinator.run.live_run"),
    "worker.state.state_dir",
)
_RUN = re.compile(r"^runs/[^/]+/?")
_WORKER = re.compile(r"\.[a-z]+\.[0-9a-f]{16}$")
_DIGEST = re.compile(r"\.[0-9a-f]{16}$")
_CONTENT = re.compile(r"\b[0-9a-f]{64}\b")
_NUMBER = re.compile(r"\b[0-9]+\b")
_CHANGE = re.compile(r"(?:INSERT INTO|UPDATE|DELETE FROM) (\w+)")


class CrashPoints:
    """In the process under test: writes every point that is passed into the file `trace`; dies at the armed one."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._trace = os.open(folder / "trace", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._order = folder / "armed"
        self._root = str(root)
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()
        self._known_order = ""

    def passed(self, point: str) -> None:
        with self._lock:
            os.write(self._trace, f"{point}\n".encode())
            order = self._order.read_text() if self._order.exists() else ""
            if order != self._known_order:
                self._known_order = order
                self._seen.clear()
            self._seen[point] += 1
            if order.split("\n")[:2] == [point, str(self._seen[point])]:
                self._order.unlink()  # once: whoever is started next lives
                os.write(self._trace, f"killed {point}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def around(self, what: str) -> Iterator[None]:
        self.passed(f"before {what}")
        yield
        self.passed(f"after {what}")

    def wrap(self, owner: Any, name: str, what: Callable[..., str | None]) -> None:
        """Make `owner.name` two points, called what `what(*arguments)` says; None: this call is none."""
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            point = what(*args)
            if point is None:
                return original(*args, **kwargs)
            with self.around(point):
                return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    def wrap_files(self) -> None:
        """fsync, rename, link, end of writing in place, and removal of what lies under `root`."""

        def of_descriptor(operation: str) -> Callable[..., str | None]:
            return lambda descriptor, *_: self._named(operation, os.readlink(f"/proc/self/fd/{descriptor}"))

        def of_path(operation: str, argument: int) -> Callable[..., str | None]:
            return lambda *args: self._named(operation, os.fspath(args[argument]))

        self.wrap(os, "fsync", of_descriptor("fsync"))
        self.wrap(os, "fdatasync", of_descriptor("fsync"))
        self.wrap(os, "ftruncate", of_descriptor("write"))
        self.wrap(os, "replace", of_path("rename to", 1))
        self.wrap(os, "rename", of_path("rename to", 1))
        self.wrap(os, "link", of_path("link", 1))
        self.wrap(os, "unlink", of_path("remove", 0))
        self.wrap(os, "rmdir", of_path("remove", 0))

    def _named(self, operation: str, path: str) -> str | None:
        """For example "fsync contributions/N in contributing.accept"."""
        return f"{operation} {kind(path, self._root)} in {caller()}" if path.startswith(self._root) else None


def kind(path: str, root: str) -> str:
    """What the file or folder below `root` is: its path without the names of runs and workers, and without numbers."""
    inside = _RUN.sub("", path[len(root) :].strip("/")) or "."
    inside = _CONTENT.sub("D", inside)
    return _NUMBER.sub("N", _DIGEST.sub(".D", _WORKER.sub(".W", inside)))


def caller() -> str:
    """The module of the product that this call was made for, and its public function, if it was called by one."""
    modules = [(frame.f_globals["__name__"], frame.f_code) for frame in _frames()]
    module = next(name for name, _ in modules if name.startswith(("coordinator.", "worker.")) and name not in _THROUGH)
    functions = [
        code.co_qualname.partition(".<locals>")[0].rpartition(".")[2] for name, code in modules if name == module
    ]
    public = [function for function in functions if not function.startswith(("_", "<"))]
    return ".".join([module.rpartition(".")[2], *public[:1]])


def _frames() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


class Changes(threading.local):
    """The tables that this thread's transaction has changed so far, which is what its commit is named by."""

    def __init__(self) -> None:
        self.tables: set[str] = set()

    def watch(self, engine: sa.Engine) -> None:
        """Look at every statement of the engine, and of those that are made of it."""

        @sa.event.listens_for(engine, "begin")
        def _begin(_: Any) -> None:
            self.tables.clear()

        @sa.event.listens_for(engine, "before_cursor_execute")
        def _change(_: Any, __: Any, statement: str, *___: Any) -> None:
            if found := _CHANGE.match(statement):
                self.tables.add(found[1])

    def __str__(self) -> str:
        return ", ".join(sorted(self.tables)) or "nothing"


# --- in the test ------------------------------------------------------------------------------------------------------


def arm(folder: Path, point: str, count: int, tag: str) -> None:
    """The process under test dies when it passes `point` for the `count`-th time from now on. `tag`: any new word."""
    new = folder / "armed.new"
    new.write_text(f"{point}\n{count}\n{tag}")
    new.replace(folder / "armed")


def trace(folder: Path) -> list[str]:
    path = folder / "trace"
    return path.read_text().splitlines() if path.exists() else []


def forked(target: Callable[..., None], *args: Any, **kwargs: Any) -> ForkServerProcess:
    """A process that runs `target(*args, **kwargs)`, forked from one that has imported the product."""
    process = START.Process(target=target, args=args, kwargs=kwargs, daemon=True)
    process.start()
    return process
