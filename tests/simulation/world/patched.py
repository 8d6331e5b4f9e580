"""Puts the coordinator's and the worker's real code into the simulated world.

Every module of the two packages gets the simulation's `threading`, `time`, `asyncio`, executors, locks, secrets and
fsync in the place of the real ones. The modules are found by themselves, so code that is added later lives in the
simulation too. Everything else (FastAPI's routing, SQLAlchemy and SQLite, httpx, torch, the file system) is real.
"""

import asyncio
import base64
import concurrent.futures
import importlib
import os
import pkgutil
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio.to_thread
import starlette.responses
from sqlalchemy import URL, Engine

import coordinator
import outerstep.common
import worker
from coordinator.store import database as database_module
from coordinator.store import postgresql, sqlite
from tests.simulation.world import primitives
from tests.simulation.world.database import EPOCH, DatabaseNode, shared_engines
from tests.simulation.world.primitives import Like
from tests.simulation.world.scheduler import Scheduler


def load_all() -> list[ModuleType]:
    """All modules of the coordinator, the worker, and what they have in common."""
    for package in (coordinator, worker, outerstep.common):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(("coordinator", "worker", "outerstep.common")) and module is not None
    ]


class _File:
    """A file as FileResponse reads it, without the event loop that anyio's own needs."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")

    async def read(self, size: int) -> bytes:
        return self._file.read(size)

    async def seek(self, offset: int) -> None:
        self._file.seek(offset)

    async def aclose(self) -> None:
        self._file.close()


async def _open_file(path: Path, mode: str) -> _File:
    return _File(path)


@cache
def engines(url: URL) -> tuple[Engine, Engine]:
    """One pair for all coordinators of this process, so that no statement is compiled twice."""
    return sqlite.engines(url)


@contextmanager
def simulated(
    scheduler: Scheduler, rng: random.Random, fsync: Callable[[int], None], database: DatabaseNode | None = None
) -> Iterator[None]:
    """The real code lives in the simulated world while the block runs. `database`: what takes PostgreSQL's place; None
    where a coordinator has its own."""

    def wall_clock() -> float:
        return EPOCH + scheduler.now + scheduler.current.group.skew_s

    def urlsafe(nbytes: int = 32) -> str:
        return base64.urlsafe_b64encode(rng.randbytes(nbytes)).rstrip(b"=").decode()

    instead: dict[int, Any] = {
        id(threading): primitives.FakeThreading(scheduler),
        id(asyncio): primitives.FakeAsyncio(scheduler),
        id(time): Like(
            time,
            monotonic=lambda: scheduler.now,
            perf_counter=lambda: scheduler.now,
            time=wall_clock,
            sleep=scheduler.sleep,
        ),
        id(os): Like(os, fsync=fsync, cpu_count=lambda: 2),
        id(secrets): Like(secrets, token_urlsafe=urlsafe, token_hex=lambda nbytes=32: rng.randbytes(nbytes).hex()),
        id(concurrent.futures.ThreadPoolExecutor): lambda count, thread_name_prefix="pool": primitives.Executor(
            scheduler, count, thread_name_prefix
        ),
        id(concurrent.futures.wait): primitives.wait_all,
        id(concurrent.futures.Future): partial(primitives.Future, scheduler),
    }
    backend = Like(sqlite, engines=engines)
    if database is not None:
        instead[id(postgresql)] = database.module()
        backend = Like(sqlite, engines=shared_engines, lock=lambda url: nullcontext(), folder=lambda url: None)
    undo: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, value: Any) -> None:
        undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    real_lock = type(threading.Lock())
    for module in load_all():
        for name, value in list(vars(module).items()):
            if id(value) in instead:
                replace(module, name, instead[id(value)])
            elif isinstance(value, real_lock):
                replace(module, name, primitives.Lock(scheduler))

    async def run_sync(act: Callable[..., Any], *args: Any, **_: Any) -> Any:
        return act(*args)

    replace(anyio.to_thread, "run_sync", run_sync)
    files = SimpleNamespace(to_thread=anyio.to_thread, open_file=_open_file, CancelScope=lambda **_: nullcontext())
    replace(starlette.responses, "anyio", files)
    replace(database_module, "BACKENDS", {"sqlite": backend})
    try:
        yield
    finally:
        for owner, name, value in reversed(undo):
            setattr(owner, name, value)
