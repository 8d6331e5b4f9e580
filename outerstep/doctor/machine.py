"""This machine: versions, compiled kernels, and the worker's state directory."""

import os
import platform
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from outerstep import __version__
from outerstep.common import files
from outerstep.common.quantities import bytes_text
from outerstep.doctor.examination import Finding, fine, warning, wrong
from protocol import PROTOCOL_VERSION
from protocol.compiled import COMPILED, KERNELS
from worker.state.state_dir import LOCK, SNAPSHOT


@dataclass(frozen=True)
class Software:
    outerstep: str
    python: str
    torch: str
    compiled: bool
    kernels: str


def look_at_software() -> Software:
    return Software(__version__, platform.python_version(), torch.__version__, COMPILED, KERNELS)


def judge_software(seen: Software) -> list[Finding]:
    versions = fine(
        "versions", f"outerstep {seen.outerstep}, protocol {PROTOCOL_VERSION}, Python {seen.python}, torch {seen.torch}"
    )
    if seen.compiled:
        return [versions, fine("kernels", seen.kernels)]
    remedy = "install a C compiler and Python.h (gcc and python3-dev), then reinstall outerstep; results are the same"
    return [versions, warning("kernels", seen.kernels, remedy)]


@dataclass(frozen=True)
class Directory:
    """The state directory. `unusable`: why nothing can be written there; None if it can."""

    path: Path
    unusable: str | None
    exists: bool
    has_snapshot: bool
    is_locked: bool
    free_bytes: int


def look_at_directory(path: Path) -> Directory:
    """Look at the directory, or at its nearest existing parent, without changing either."""
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    unusable = None
    try:
        with tempfile.TemporaryFile(dir=nearest):  # it has no name in the directory
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


def judge_directory(seen: Directory) -> list[Finding]:
    if seen.unusable is not None:
        remedy = "give another one with --state, or fix its permissions or its disk"
        return [wrong("state", f"nothing can be written to {seen.unusable}", remedy)]
    if seen.is_locked:
        said = f"another process uses {seen.path}: a worker with this name already runs on this machine"
        return [wrong("state", said, "keep that worker, or give this one another --name or --state")]
    if seen.has_snapshot:
        return [fine("state", f"{seen.path} has a snapshot, from which the worker will continue")]
    return [fine("state", f"{seen.path} {'is writable' if seen.exists else 'can be created'}")]


def judge_disk(seen: Directory, need_bytes: int) -> list[Finding]:
    said = f"the worker's state needs up to {bytes_text(need_bytes)}; {bytes_text(seen.free_bytes)} are free"
    if seen.has_snapshot or seen.free_bytes > 2 * need_bytes:
        return [fine("disk", said)]
    if seen.free_bytes > need_bytes:
        return [warning("disk", said, "free some space, or give --state on another disk")]
    return [wrong("disk", said, "free some space, or give --state on another disk")]
