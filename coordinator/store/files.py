"""The data directory: which files it has, and how a file becomes durable.

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
PIECE_BYTES = 1 << 18  # of a transfer: so much stays in the processor's cache while it is copied

_folders = threading.Lock()  # makes and removes folders: one that is found is durable, and stays while the lock is held


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
        """Return an unused path for a file to be written. What is still there at the next start is deleted."""
        return self._incoming / str(next(self._numbers))

    def run(self, name: str) -> "RunFiles":
        return RunFiles(self.root / "runs" / name)

    def close(self) -> None:
        self._lock.close()


class RunFiles:
    """The paths of one run's files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("contributions", "deltas", "checkpoints", "state"):
            (root / folder).mkdir(parents=True, exist_ok=True)
            # An earlier process may have made what is in it just before it died: there, but not yet durable.
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
        """Return the path of a state file. Two take turns: state r + 1 is written over state r − 1, whose pages are in
        memory already."""
        return self.root / "state" / f"{fragment}.{round_ % 2}"

    def rounds(self, folder: str) -> list[int]:
        """Return the rounds that have files in `folder`, in order."""
        return sorted(int(path.name) for path in (self.root / folder).iterdir())

    def remove_round(self, folder: str, round_: int) -> None:
        with _folders:
            shutil.rmtree(self.root / folder / str(round_))


@dataclass(frozen=True)
class Body:
    """The body of an upload: a payload in a new file under `incoming/`, not yet durable. `content`: the same in memory,
    if there was room for it."""

    path: Path
    size: int
    digest: bytes
    content: memoryview | None

    @contextmanager
    def payload(self) -> Iterator[Payload]:
        """Open the payload for reading. Raises WireError."""
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
    """Give `temporary`, which is fsynced already, its final name durably."""
    with _folders:
        if not final.parent.is_dir():
            final.parent.mkdir()
            try:
                fsync(final.parent.parent)
            except BaseException:  # such as a full disk: whoever finds the folder takes it for durable
                final.parent.rmdir()
                raise
        temporary.replace(final)
    fsync(final.parent)


def file_digest(path: Path) -> bytes:
    """Return the BLAKE3 digest of the file."""
    hasher = blake3()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            hasher.update(block)
    return hasher.digest()


def has_digest(path: Path, digest: bytes) -> bool:
    """Return True if the file is there, can be read and has this BLAKE3 digest."""
    try:
        return file_digest(path) == digest
    except OSError:  # missing or unreadable
        return False


def disk_bytes(files: RunFiles) -> DiskBytes:
    """Return the bytes of a run's files, by kind. A file with two names counts once, as a checkpoint."""
    seen: set[int] = set()

    def size_of(folder: Path) -> int:
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

    kinds = ("contributions", "deltas", "checkpoints", "state", "set-aside")  # checkpoints before state
    return DiskBytes(**{kind.replace("-", "_"): size_of(files.root / kind) for kind in kinds})


class ReadBuffer:
    """Memory into which payload files are read, used again for every read: allocating would cost as much as reading."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def of(self, length: int) -> memoryview:
        """Return `length` bytes of memory, valid until the next call."""
        if len(self._memory) < length:
            self._memory = memoryview(bytearray(length))
        return self._memory[:length]


class PayloadFile(Payload):
    """A payload in a file, of which one chunk at a time is in memory: as many may be open as there are workers.

    Several may share their `memory`; a chunk is valid until the next one is read into it.
    """

    def __init__(self, path: Path, memory: ReadBuffer | None = None) -> None:
        self._memory = memory or ReadBuffer()
        self._file = os.open(path, os.O_RDONLY)
        try:
            super().__init__(self._read, os.fstat(self._file).st_size)
        except BaseException:
            os.close(self._file)
            raise

    def _read(self, offset: int, length: int) -> memoryview:
        block = self._memory.of(length)
        return block[: os.preadv(self._file, [block], offset)]

    def close(self) -> None:
        os.close(self._file)
        self._memory = ReadBuffer()  # frees it: the request that read from it may live much longer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HashedPayloadFile(PayloadFile):
    """A payload file that is read once, chunk after chunk, and hashed in passing."""

    def __init__(self, path: Path, memory: ReadBuffer) -> None:
        self._hasher, self._hashed_bytes = blake3(), 0
        super().__init__(path, memory)

    def _read(self, offset: int, length: int) -> memoryview:
        data = super()._read(offset, length)
        if offset == self._hashed_bytes:
            self._hasher.update(data)
            self._hashed_bytes += len(data)
        return data

    def is_intact(self, digest: bytes) -> bool:
        """Return True if all of it was read, in order, and has this BLAKE3 digest."""
        return self._hashed_bytes == self.total_bytes and self._hasher.digest() == digest

    def close(self) -> None:
        # It is durable and will hardly be read again: the next upload needs the memory of its cached pages more.
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        super().close()


def fsync(path: Path) -> None:
    """Make a file's content, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
