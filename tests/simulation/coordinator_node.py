"""The coordinator as one simulated process: the real application, called without a socket and without an event loop.

It can crash before and after every fsync and every commit, lose power there, run out of disk, and be slow.
"""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI

from coordinator.app import create_app
from coordinator.run.live_run import LiveRun
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store import sqlite
from coordinator.store.blobs import StoreOutage
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import Database
from coordinator.store.identity import Actor
from protocol.messages import Scope, TokenRequest
from tests.simulation.disk import Disk
from tests.simulation.patched import EPOCH, engines
from tests.simulation.primitives import FakeLoop, drive
from tests.simulation.scheduler import Group, Killed, Scheduler
from tests.simulation.store import StoreBlobs, StoreNode

TICK_S = 0.5
Answer = tuple[int, list[tuple[bytes, bytes]], bytes]


@cache
def template(root: Path) -> Path:
    """A database at the newest schema, to be copied: migrating takes longer than a whole simulated run."""
    folder = root / f"template-{os.getpid()}"
    folder.mkdir()
    Database(sqlite.url_in(folder)).close()
    return folder / sqlite.FILE


@cache
def application() -> FastAPI:
    """One for all coordinators of this process: making its routes and models takes longer than a simulated run."""
    return create_app(None)  # type: ignore[arg-type]


class CoordinatorNode:
    """One data directory and the process that serves it, if one does."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, root: Path, store: StoreNode | None = None) -> None:
        self.scheduler, self.rng, self.root, self.store = scheduler, rng, root, store
        self.disk = Disk()
        self.generation = 0
        self.group = Group("coordinator 0")
        self.group.dead = True
        self.service: Coordinator | None = None
        self.app: FastAPI | None = None
        self.full_until = 0.0
        self.slow_until = 0.0
        self.crash_next: bool | None = None  # crash at the next point; True: the machine loses power
        self.crashes: dict[str, int] = {}  # at which kind of point
        self.crash_chance = 0.0
        self.dirty = True  # something was committed since the invariants were checked
        self.admin_token = self.worker_token = ""
        self.data_dir = root / "data-0"
        self.data_dir.mkdir()
        self.served_dir = root.parent / f"data-{os.getpid()}"  # where the process finds it: always at the same path
        shutil.copy(template(root.parent), self.data_dir / sqlite.FILE)
        self.on_crash: Callable[[], None] = lambda: None
        self.on_start: Callable[[], None] = lambda: None
        self.on_commit: Callable[[], None] = lambda: None
        self.in_start = False

    @property
    def up(self) -> bool:
        return self.service is not None

    @property
    def run(self) -> LiveRun:
        assert self.service is not None
        return self.service.run("sim")

    # --- its life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a process on the data directory; it serves when its first task has got that far."""
        self.group = Group(f"coordinator {self.generation}")
        for engine in engines(sqlite.url_in(self.served_dir)):
            engine.dispose()  # closes the files of whoever served there before
        self.served_dir.unlink(missing_ok=True)
        self.served_dir.symlink_to(self.data_dir)
        self.scheduler.spawn(self._serve, self.group.name, self.group)

    def _serve(self) -> None:
        self.in_start = True
        clock = self.scheduler
        try:
            settings = Settings(data_dir=self.served_dir)
            service = Coordinator(
                settings,
                clock=lambda: clock.now,
                now=lambda: EPOCH + clock.now,
                store=None if self.store is None else self._blobs,
                secret=b"of the simulation",
            )
        except OSError as error:  # no room, no store: the process ends, and its supervisor starts it again
            if error.errno != errno.ENOSPC and not isinstance(error, StoreOutage):
                raise
            self.crash(power=False)
            raise Killed from error
        service.waiters.attach(FakeLoop(self.scheduler))  # type: ignore[arg-type]
        if not self.worker_token:
            self.admin_token = (self.data_dir / "admin.token").read_text().strip()
            request = TokenRequest(scope=Scope.WORKER, names=100)
            self.worker_token = service.new_token(request, Actor()).token
        self.app = application()
        self.app.state.coordinator = service
        self.service = service
        self.in_start = False
        self.on_start()
        while True:
            service.tick()
            self.scheduler.sleep(TICK_S)

    def _blobs(self, _: DataDirectory) -> StoreBlobs:
        assert self.store is not None
        return StoreBlobs(self, self.store)

    def read(self, name: str) -> bytes | None:
        """A blob as it is now; None if there is none."""
        if self.store is not None:
            found = self.store.objects.get(name)
            return None if found is None else found.content
        path = self.data_dir / name
        return path.read_bytes() if path.is_file() else None

    def names(self, prefix: str) -> list[str]:
        """The blobs under `prefix`. Takes no time, unlike the coordinator's own requests."""
        if self.store is not None:
            return [name for name in self.store.objects if name.startswith(prefix)]
        return [str(each.relative_to(self.data_dir)) for each in (self.data_dir / prefix).glob("*/*")]

    def crash(self, *, power: bool) -> None:
        """kill -9, or the plug; what is left of the files is in another directory afterwards."""
        self.on_crash()
        old, self.generation = self.data_dir, self.generation + 1
        self.data_dir = self.root / f"data-{self.generation}"
        disk = (
            self.disk.after_power_loss(old, self.data_dir, self.rng)
            if power
            else self.disk.after_kill(old, self.data_dir)
        )
        self.disk.close()
        self.disk = disk
        self.service, self.app, self.crash_next = None, None, None
        self.scheduler.kill(self.group)

    # --- its disk -------------------------------------------------------------------------------------------------

    def fsync(self, descriptor: int) -> None:
        self.crash_point("before an fsync")
        if self.scheduler.now < self.full_until:
            raise OSError(errno.ENOSPC, "no space left on the simulated device")
        if not self.group.indivisible:
            slow = self.scheduler.now < self.slow_until
            self.scheduler.sleep(self.rng.uniform(0, 3.0 if slow else 0.01))
        self.disk.fsynced(descriptor)
        self.crash_point("after an fsync")

    def crash_point(self, what: str) -> None:
        """Perhaps the coordinator ends here."""
        if self.group.dead:
            raise Killed
        if self.crash_next is None and self.rng.random() < self.crash_chance:
            self.crash_next = self.rng.random() < 0.5
        if self.crash_next is not None:
            self.crashes[what] = self.crashes.get(what, 0) + 1
            self.crash(power=self.crash_next)
            raise Killed

    # --- its network side -----------------------------------------------------------------------------------------

    def answer(self, method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes) -> Answer:
        """What the application answers. Called in a task of this process."""
        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": headers,
            "client": ("worker", 1),
            "server": ("coordinator", 80),
        }
        left = [body]
        status, answered, pieces = 0, [], []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": left.pop() if left else b"", "more_body": False}

        async def send(message: Any) -> None:
            nonlocal status, answered
            if message["type"] == "http.response.start":
                status, answered = message["status"], list(message["headers"])
            else:
                pieces.append(bytes(message.get("body", b"")))

        drive(self.app(scope, receive, send))  # type: ignore[misc]
        return status, answered, b"".join(pieces)


@contextmanager
def crash_at_commits(node: CoordinatorNode, plain: Callable[[Database], Any]) -> Iterator[None]:
    """Points before and after every commit; no other task runs within a transaction."""

    @contextmanager
    def write(self: Database) -> Iterator[Any]:
        group = node.scheduler.current.group
        group.indivisible += 1
        try:
            with plain(self) as session:
                yield session
                if group is node.group:
                    node.crash_point("before a commit")
        finally:
            group.indivisible -= 1
        node.dirty = True
        node.on_commit()
        if group is node.group:
            node.crash_point("after a commit")

    real = Database.write
    Database.write = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        Database.write = real  # type: ignore[method-assign]
