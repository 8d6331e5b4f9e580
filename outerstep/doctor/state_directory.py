"""The worker's state directory: usable, free, and with room for what a worker writes into it."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from outerstep.common import files
from outerstep.common.quantities import bytes_text
from outerstep.doctor.finding import Finding, fine, warning, wrong
from worker.state.state_dir import LOCK, SNAPSHOT

OUTER_STATE_BYTES = 8  # of an element: parameter and momentum, fp32
WORK_BYTES = 4  # at most: what of an element was sent, and what no mean has


@dataclass(frozen=True)
class Directory:
    """`unusable`: why nothing can be written there, or None."""

    path: Path
    unusable: str | None
    exists: bool
    has_snapshot: bool
    is_locked: bool
    free_bytes: int


def look(path: Path) -> Directory:
    """Look at the directory, or at the nearest one above it that exists; both stay as they are."""
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    unusable = None
    try:
        with tempfile.TemporaryFile(dir=nearest):  # which has no name in it
            pass
    except OSError as error:
        unusable = f"{nearest}: {error.strerror}"
    has_snapshot = (path / SNAPSHOT).exists() if path.is_dir() else False
    return Directory(
        path, unusable, path.is_dir(), has_snapshot, _is_locked(path / LOCK), shutil.disk_usage(nearest).free
    )


def _is_locked(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:
        return False
    try:
        return not files.try_lock(descriptor)
    finally:
        os.close(descriptor)


def judge(seen: Directory) -> list[Finding]:
    if seen.unusable is not None:
        remedy = "give another one with --state, or mend its permissions or its disk"
        return [wrong("state", f"nothing can be written to {seen.unusable}", remedy)]
    if seen.is_locked:
        said = f"another process works in {seen.path}: a worker of this name runs on this machine already"
        return [wrong("state", said, "leave that one alone, or give this one another --name or --state")]
    if seen.has_snapshot:
        return [fine("state", f"{seen.path} has a snapshot, from which the worker goes on")]
    return [fine("state", f"{seen.path} {'can be written to' if seen.exists else 'can be made'}")]


def snapshot_bytes(elements: int, optimizer_bytes: float) -> int:
    """Return the most that a worker's files take at any time: two outer states that take turns and a snapshot, and
    beside them the one of these that is being written. `optimizer_bytes`: of the inner optimizers, per element."""
    state, snapshot = OUTER_STATE_BYTES * elements, (optimizer_bytes + WORK_BYTES) * elements
    return int(2 * state + snapshot + max(state, snapshot))


def judge_disk(seen: Directory, need_bytes: int) -> list[Finding]:
    said = f"snapshots take up to {bytes_text(need_bytes)}; {bytes_text(seen.free_bytes)} are free"
    if seen.has_snapshot or seen.free_bytes > 2 * need_bytes:
        return [fine("disk", said)]
    if seen.free_bytes > need_bytes:
        return [warning("disk", said, "make room, or give --state on another disk")]
    return [wrong("disk", said, "make room, or give --state on another disk")]
