"""The coordinator as one simulated process: the real application, called without a socket and without an event loop.

It can crash before and after every fsync and every commit.
"""

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from fastapi import FastAPI
from sqlalchemy.exc import DBAPIError
from starlette.types import ASGIApp

from coordinator.api.app import create_app
from coordinator.run.live_run import LiveRun
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store import sqlite
from coordinator.store.blobs import StoreOutage
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import Database
from coordinator.store.identity import Actor
from protocol.messages import Scope, TokenRequest
from tests.simulation.world.database import EPOCH
from tests.simulation.world.machine import Machine
from tests.simulation.world.patched import engines
from tests.simulation.world.primitives import FakeLoop, drive
from tests.simulation.world.scheduler import Group, Scheduler
from tests.simulation.world.store import Answer, Headers, StoreBlobs, StoreNode

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

TICK_S = 0.5
MOST_WORKERS = 5  # that are honest: w0, w1 and so on
SECRET = b"of the simulation"


@cache
def template(root: Path) -> Path:
    """A database at the newest schema, to be copied: migrating takes longer than a whole simulated run."""
    folder = root / f"template-{os.getpid()}"
    folder.mkdir()
    Database(sqlite.url_in(folder)).close()
    return folder / sqlite.FILE


@cache
def application(number: int = 0) -> FastAPI:
    """Those of this process, to be used again: making the routes and models takes longer than a simulated run."""
    return create_app(None)  # type: ignore[arg-type]


class CoordinatorNode(Machine):
    """The only coordinator, which has its database in its data directory."""

    database = None

    def __init__(self, scheduler: Scheduler, rng: random.Random, root: Path, store: StoreNode | None = None) -> None:
        super().__init__(scheduler, rng, root, "data")
        self.store = store
        self.service: Coordinator | None = None
        self.app: FastAPI | None = None
        self.dirty = True  # something was committed since the invariants were checked
        self.worker_tokens: dict[str, str] = {}
        self.served_dir = root.parent / f"data-{os.getpid()}"  # where the process finds it: always at the same path
        shutil.copy(template(root.parent), self.data_dir / sqlite.FILE)
        self.on_crash: Callable[[], None] = lambda: None
        self.on_start: Callable[[Coordinator, bool], None] = lambda service, directly: None
        self.on_commit: Callable[[], None] = lambda: None
        self.in_start = False
        self.machines: list[Machine] = [self]

    @property
    def up(self) -> bool:
        return self.service is not None

    @property
    def run(self) -> LiveRun:
        assert self.service is not None
        return self.service.run("sim")

    def any_machine(self) -> Machine:
        return self

    def is_gone(self, machine: Machine) -> bool:
        """Whether a machine that is down never comes back."""
        return False

    def door(self) -> "CoordinatorNode":
        """Whom a request reaches."""
        return self

    def machine_of(self, group: Group) -> Machine | None:
        """The machine whose process is `group`, if it is one that may crash at a commit."""
        return self if group is self.group else None

    def ordered(self, act: Callable[[], object]) -> Callable[[], object]:
        """What an operator lets a task of `group` do."""
        return act

    # --- its life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a process on the data directory; it serves when its first task has got that far."""
        for engine in engines(sqlite.url_in(self.served_dir)):
            engine.dispose()  # closes the files of whoever served there before
        self.served_dir.unlink(missing_ok=True)
        self.served_dir.symlink_to(self.data_dir)
        super().start()

    def serve(self) -> None:
        self.in_start = True
        clock = self.scheduler
        try:
            settings = Settings(data_dir=self.served_dir)
            service = Coordinator(
                settings,
                clock=lambda: clock.now,
                now=lambda: EPOCH + clock.now,
                store=None if self.store is None else self._blobs,
                secret=SECRET,
            )
        except OSError as error:  # no room, no store: the process ends, and its supervisor starts it again
            if error.errno != errno.ENOSPC and not isinstance(error, StoreOutage):
                raise
            self.end()
        service.waiters.attach(FakeLoop(self.scheduler))  # type: ignore[arg-type]
        add_worker_tokens(service, self.worker_tokens)
        self.app = application()
        self.app.state.coordinator = service
        self.service = service
        self.in_start = False
        self.on_start(service, True)
        while True:
            service.tick()
            self.scheduler.sleep(TICK_S)

    def _blobs(self, _: DataDirectory) -> StoreBlobs:
        assert self.store is not None
        return StoreBlobs(self, self.store)

    def read(self, name: str) -> bytes | None:
        """A blob as it is now; None if there is none."""
        if self.store is not None:
            return self.store.read(name)
        path = self.data_dir / name
        return path.read_bytes() if path.is_file() else None

    def names(self, prefix: str) -> list[str]:
        """The blobs under `prefix`. Takes no time, unlike the coordinator's own requests."""
        if self.store is not None:
            return self.store.names(prefix)
        return [str(each.relative_to(self.data_dir)) for each in (self.data_dir / prefix).glob("*/*")]

    def crashing(self) -> None:
        self.on_crash()
        self.service, self.app = None, None

    def answer(self, method: str, target: str, headers: Headers, body: bytes) -> Answer:
        """What the application answers. Called in a task of this process."""
        assert self.app is not None
        return answer_of(self.app, method, target, headers, body)


def add_worker_tokens(service: Coordinator, tokens: dict[str, str]) -> None:
    """Add the token of each worker that has none yet, so that no two share one."""
    for number in range(MOST_WORKERS):
        if f"w{number}" not in tokens:
            tokens[f"w{number}"] = service.new_token(TokenRequest(scope=Scope.WORKER, names=1), Actor()).token


def answer_of(app: ASGIApp, method: str, target: str, headers: Headers, body: bytes) -> Answer:
    """What an application answers."""
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

    drive(app(scope, receive, send))
    return status, answered, b"".join(pieces)


@contextmanager
def crash_at_commits(node: "CoordinatorNode | Cluster", plain: Callable[[Database], Any]) -> Iterator[None]:
    """Points before and after every commit; no other task runs within a transaction."""

    @contextmanager
    def write(self: Database) -> Iterator[Any]:
        group = node.scheduler.current.group
        machine = node.machine_of(group)
        if node.database is not None:
            node.database.request(writing=True)
        group.indivisible += 1
        try:
            with plain(self) as session:
                yield session
                if machine is not None:
                    machine.crash_point("before a commit")
        except DBAPIError:  # it may have happened all the same
            _committed(node)
            raise
        finally:
            group.indivisible -= 1
        _committed(node)
        if machine is not None:
            machine.crash_point("after a commit")

    real = Database.write
    Database.write = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        Database.write = real  # type: ignore[method-assign]


def _committed(node: "CoordinatorNode | Cluster") -> None:
    node.dirty = True
    node.on_commit()
