"""The processes under test of `crash_points.py`: a coordinator, a worker, a backup and a restore, started as their
commands start them."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from sqlalchemy import URL, Engine
from sqlalchemy.orm import Session

import coordinator.backup.restore
import coordinator.server
import worker.agent
import worker.diloco
from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store import database, sqlite
from outerstep.cli import main
from tests.support.crash_points import Changes, CrashPoints, caller
from worker.link.client import Client
from worker.state.mapped import MappedArrays
from worker.state.outer_state import OuterState

IMPORTED = (
    coordinator.backup.restore,
    coordinator.server,
    worker.agent,
    transformers.LlamaForCausalLM,
)  # once, before the fork


def run_coordinator(folder: Path, data_dir: Path, port: int) -> None:
    """`outerstep coordinator`; what it prints goes to the file `out`, its log to `log`."""
    points = CrashPoints(folder, data_dir)
    points.wrap_files()
    write, engines, changes = database.Database.write, sqlite.engines, Changes()

    def watched(url: URL) -> tuple[Engine, Engine]:
        reading, writing = engines(url)
        changes.watch(writing)
        return reading, writing

    @contextmanager
    def pointed(self: database.Database) -> Iterator[Session]:
        changes.tables.clear()
        where = caller()
        with write(self) as session:
            yield session
            session.flush()
            point = f"commit of {changes} in {where}"
            points.passed(f"before {point}")
        points.passed(f"after {point}")

    sqlite.engines = watched
    database.Database.write = pointed  # type: ignore[method-assign]
    points.wrap(database, "upgrade", lambda *_: "migrations")
    _become(folder, ["coordinator", "--data-dir", str(data_dir), "--port", str(port)])


def run_worker(folder: Path, url: str, run: str, token: str, *, in_files: bool) -> None:
    """`outerstep worker`, named like its folder. `in_files`: its outer state is in files, as that of a large model."""
    points = CrashPoints(folder, folder / "state")
    points.wrap_files()
    for request in ("join", "leave", "assignment", "seed", "contribute", "delta", "report_evaluation"):
        points.wrap(Client, request, lambda *_, request=request: request)
    points.wrap(OuterState, "step", lambda *_: "outer step")
    points.wrap(torch.optim.AdamW, "step", lambda *_: "inner step")
    points.wrap(MappedArrays, "write", lambda *_: "write of the outer state")
    worker.diloco.is_mapped = lambda *_, **__: in_files  # type: ignore[attr-defined]
    os.environ["OUTERSTEP_TOKEN"] = token
    arguments = ["worker", url, "--run", run, "--name", folder.name, "--state-dir", str(folder / "state")]
    _become(folder, [*arguments, "--device", "cpu", "--data-root", "/"])


def run_backup(folder: Path, data_dir: Path, root: Path) -> None:
    """`outerstep coordinator backup`, of which one stays."""
    CrashPoints(folder, root).wrap_files()
    _become(folder, ["coordinator", "backup", str(root), "--data-dir", str(data_dir), "--backup-keep", "1"])


def run_bucket_start(folder: Path, environment: dict[str, str], data_dir: Path, url: str) -> None:
    """A coordinator whose blobs are in a bucket starts, which makes a backup, and stops."""
    os.environ.update(environment)
    _redirect(folder)
    Coordinator(Settings(data_dir=data_dir, blobs=url)).close()


def run_bucket_restore(folder: Path, environment: dict[str, str], data_dir: Path, url: str) -> None:
    """`outerstep coordinator restore`, from a bucket."""
    os.environ.update(environment)
    _become(folder, ["coordinator", "restore", url, "--data-dir", str(data_dir)])


def run_restore(folder: Path, root: Path, data_dir: Path) -> None:
    """`outerstep coordinator restore`."""
    CrashPoints(folder, data_dir).wrap_files()
    _become(folder, ["coordinator", "restore", str(root), "--data-dir", str(data_dir)])


def _become(folder: Path, arguments: list[str]) -> None:
    """The command, with its output in files."""
    _redirect(folder)
    sys.argv = ["outerstep", *arguments]
    main()


def _redirect(folder: Path) -> None:
    for name, stream in (("out", 1), ("log", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
