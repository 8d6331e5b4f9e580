"""The data directory: where each file lies, and how a file becomes durable.

    outerstep.db  admin.token  lock
    incoming/                                               being received or written; emptied at start
    runs/{run}/contributions/{round}/{p}.{worker}.{digest}   acknowledged contributions
    runs/{run}/deltas/{round}/{p}                            published deltas
    runs/{run}/checkpoints/{round}/{p}                       checkpoints
    runs/{run}/state/{p}.{0 or 1}                            the current outer state; derived, so not fsynced
    runs/{run}/set-aside/{n}/                                files newer than a database restored from a backup

Contributions, deltas and checkpoints are immutable payloads: written under `incoming/`, fsynced, renamed, and their
directory fsynced. They exist only together with a row in the database; what has no row is swept at start.
"""

import fcntl
import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from blake3 import blake3

from protocol.errors import OuterstepError
from protocol.messages import DiskBytes
from protocol.wire import Payload

READ_BYTES = 1 << 20
PIECE_BYTES = 1 << 18  # that stay in the cache while they are copied

_folders = threading.Lock()  # who finds a folder may rely on its being durable, and on its staying there


class DataDirectory:
    """One coordinator's data directory, locked while it is in use."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            root.mkdir(parents=True)
            fsync(root.parent)
        self.root = root
        self._lock = (root / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise OuterstepError(
                f"{root} is in use by another coordinator; stop it or choose another --data"
            ) from error
        self._incoming = root / "incoming"
        shutil.rmtree(self._incoming, ignore_errors=True)
        self._incoming.mkdir()
        self._numbers = itertools.count()

    def incoming(self) -> Path:
        """A new name for a file that is being written. What is still there at the next start is deleted."""
        return self._incoming / str(next(self._numbers))

    def run(self, name: str) -> "RunFiles":
        return RunFiles(self.root / "runs" / name)

    def close(self) -> None:
        self._lock.close()


class RunFiles:
    """Where one run's files lie."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("contributions", "deltas", "checkpoints", "state"):
            (root / folder).mkdir(parents=True, exist_ok=True)
            # What is found in it, an earlier process may have made just before it died: there, but not yet durable.
            fsync(root / folder)
        for path in (root, root.parent, root.parent.parent):
            fsync(path)

    def contribution(self, round_: int, fragment: int, worker: str, digest: bytes) -> Path:
        return self.root / "contributions" / str(round_) / f"{fragment}.{worker}.{digest.hex()[:16]}"

    def delta(self, round_: int, fragment: int) -> Path:
        return self.root / "deltas" / str(round_) / str(fragment)

    def checkpoint(self, round_: int, fragment: int) -> Path:
        return self.root / "checkpoints" / str(round_) / str(fragment)

    def state(self, fragment: int, round_: int) -> Path:
        """Two files take turns: state r + 1 is written over state r − 1, whose pages are in memory already."""
        return self.root / "state" / f"{fragment}.{round_ % 2}"

    def rounds(self, folder: str) -> list[int]:
        """The rounds that have files in `folder`."""
        return sorted(int(path.name) for path in (self.root / folder).iterdir())

    def remove_round(self, folder: str, round_: int) -> None:
        with _folders:
            shutil.rmtree(self.root / folder / str(round_))


@dataclass(frozen=True)
class Body:
    """A payload in a new file under `incoming/`, not yet durable; and in memory, where there was room for it."""

    path: Path
    size: int
    digest: bytes
    content: memoryview | None

    @contextmanager
    def payload(self) -> Iterator[Payload]:
        """It, to be read. Raises WireError."""
        if self.content is not None:
            yield Payload.from_bytes(self.content)
        else:
            with PayloadFile(self.path) as payload:
                yield payload


def make_durable(temporary: Path, final: Path) -> None:
    """Give `temporary` its final name, safe from a crash at any instant: fsync, rename, fsync the directory."""
    fsync(temporary)
    place(temporary, final)


def place(temporary: Path, final: Path) -> None:
    """Give `temporary`, which was fsynced, its final name durably."""
    with _folders:
        if not final.parent.is_dir():
            final.parent.mkdir()
            try:
                fsync(final.parent.parent)
            except BaseException:  # a full disk: who finds it would take it for durable
                final.parent.rmdir()
                raise
        temporary.replace(final)
    fsync(final.parent)


def file_digest(path: Path) -> bytes:
    hasher = blake3()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            hasher.update(piece)
    return hasher.digest()


def intact(path: Path, digest: bytes) -> bool:
    """Whether the file is there and is what `digest` says."""
    try:
        return file_digest(path) == digest
    except OSError:  # gone, or the disk cannot read it
        return False


def disk_bytes(files: RunFiles) -> DiskBytes:
    """What a run's files weigh, by kind. The second name of a file that is a checkpoint counts nothing."""
    seen: set[int] = set()

    def weigh(folder: Path) -> int:
        total = 0
        for path in folder.rglob("*"):
            try:
                found = path.stat()
            except FileNotFoundError:  # deleted meanwhile
                continue
            if path.is_file() and found.st_ino not in seen:
                seen.add(found.st_ino)
                total += found.st_size
        return total

    kinds = ("contributions", "deltas", "checkpoints", "state", "set-aside")  # in this order: a checkpoint is no state
    return DiskBytes(**{kind.replace("-", "_"): weigh(files.root / kind) for kind in kinds})


class Memory:
    """Where what is read of payload files lies, each piece until the next one is read: new memory would cost as much
    as the reading."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def of(self, length: int) -> memoryview:
        if len(self._memory) < length:
            self._memory = memoryview(bytearray(length))
        return self._memory[:length]


class PayloadFile(Payload):
    """A payload in a file, read piece by piece: as many may be open at once as there are workers. They may share their
    `memory`; a chunk is valid until the next one is read into it."""

    def __init__(self, path: Path, memory: Memory | None = None) -> None:
        self._memory = memory or Memory()
        self._file = os.open(path, os.O_RDONLY)
        try:
            super().__init__(self._read, os.fstat(self._file).st_size)
        except BaseException:
            os.close(self._file)
            raise

    def _read(self, offset: int, length: int) -> memoryview:
        piece = self._memory.of(length)
        return piece[: os.preadv(self._file, [piece], offset)]

    def close(self) -> None:
        os.close(self._file)
        self._memory = Memory()  # whoever closed it may wait for long, in a crowd

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HashedPayloadFile(PayloadFile):
    """A payload file that is read once, chunk after chunk, and hashed on the way."""

    def __init__(self, path: Path, memory: Memory) -> None:
        self._hasher, self._hashed_bytes = blake3(), 0
        super().__init__(path, memory)

    def _read(self, offset: int, length: int) -> memoryview:
        data = super()._read(offset, length)
        if offset == self._hashed_bytes:
            self._hasher.update(data)
            self._hashed_bytes += len(data)
        return data

    def is_intact(self, digest: bytes) -> bool:
        """Whether all of it was read, in order, and was what `digest` says."""
        return self._hashed_bytes == self.total_bytes and self._hasher.digest() == digest

    def close(self) -> None:
        # It is durable, and hardly anybody will read it again: its pages are worth more to the next upload.
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        super().close()


def fsync(path: Path) -> None:
    """Make a file's content, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
