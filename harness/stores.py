"""The blob store of a coordinator in a thread: its data directory, memory with `pytest --blobs=memory`, or a bucket
with `pytest --blobs=bucket`; and helpers that read and damage blobs."""

import atexit
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Self

from sqlalchemy import URL, make_url

from coordinator.backup import bucket
from coordinator.run.live_run import LiveRun
from coordinator.store import sqlite
from coordinator.store.blobs import Blobs, DirectAccess, Kind, OwnedBucket, Reader, round_of
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import Database
from coordinator.store.directory_blobs import DirectoryBlobs
from coordinator.store.opening import objects_at
from harness.postgres import PostgreSQL, postgresql
from harness.seaweedfs import SeaweedFS, seaweedfs
from protocol.digest import Buffer


class BytesReader:
    """An open `coordinator.store.blobs.Reader` of bytes in memory."""

    def __init__(self, content: bytes) -> None:
        self._content: bytes | None = content
        self.size = len(content)

    def read_into(self, memory: memoryview, at: int) -> int:
        if self._content is None:
            raise ValueError("this reader is closed")
        piece = self._content[at : at + len(memory)]
        memory[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._content = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def bytes_of(source: Buffer | Path) -> bytes:
    """The content of what is put."""
    return source.read_bytes() if isinstance(source, Path) else bytes(memoryview(source).cast("B"))


class WholeBlobs:
    """The methods of `Blobs` that read. `_content` returns a whole blob, or raises FileNotFoundError."""

    def _content(self, name: str) -> bytes:
        raise NotImplementedError

    def open(self, name: str, *, fresh: bool = False) -> BytesReader:
        return BytesReader(self._content(name))

    def fetch(self, name: str, target: Path) -> None:
        content = self._content(name)
        target.unlink(missing_ok=True)
        target.write_bytes(content)


class MemoryBlobs(WholeBlobs):
    """Blobs in a dict. They live as long as this object, so a restarted coordinator must get the same one."""

    direct: DirectAccess | None = None
    bucket: OwnedBucket | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contents: dict[str, bytes] = {}

    def put(self, name: str, source: Buffer | Path) -> bool:
        content = bytes_of(source)
        with self._lock:
            return self._contents.setdefault(name, content) is content

    def rename(self, name: str, new_name: str) -> None:
        content = self._content(name)
        with self._lock:
            self._contents[new_name] = content
        self.delete(name)

    def delete(self, *names: str) -> None:
        with self._lock:
            for name in names:
                self._contents.pop(name, None)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        with self._lock:
            found = [(name, len(content)) for name, content in self._contents.items() if name.startswith(prefix)]
        yield from found

    def stat(self, name: str) -> int | None:
        content = self._contents.get(name)
        return None if content is None else len(content)

    def _content(self, name: str) -> bytes:
        try:
            return self._contents[name]
        except KeyError:
            raise FileNotFoundError(name) from None


kind = "directory"  # set by `--blobs`
database = "sqlite"  # set by `--database`
standby = False  # set by `--standby`
aggregator = False  # set by `--aggregator`
_by_directory: dict[Path, MemoryBlobs] = {}  # so that a coordinator that restarts on its directory finds them
_servers = ExitStack()  # ends with the process
atexit.register(_servers.close)


def store(data: DataDirectory) -> Blobs:
    """Return the store of a coordinator with this data directory."""
    match kind:
        case "memory":
            return _by_directory.setdefault(data.root, MemoryBlobs())
        case "bucket":
            return _in_bucket(_server().url(f"{os.getpid()}{data.root}"), data)
        case _:
            return DirectoryBlobs(data)


def _in_bucket(url: str, data: DataDirectory) -> Blobs:
    from coordinator.store.direct_access import open_direct
    from coordinator.store.object_blobs import ObjectBlobs

    bucket = OwnedBucket.taken(objects_at(url), "its owner")
    assert bucket is not None
    return ObjectBlobs(bucket, data, direct=open_direct(bucket.objects))


_databases: dict[Path, URL] = {}


def database_of(data_dir: Path) -> URL:
    """Return the URL of the database of a coordinator with this data directory."""
    if database == "sqlite":
        return sqlite.url_in(data_dir)
    if data_dir not in _databases:
        name = f"test{len(_databases)}"
        _databases[data_dir] = make_url(_postgresql().create(name, template="migrated"))
    return _databases[data_dir]


@cache
def _postgresql() -> PostgreSQL:
    server = _servers.enter_context(postgresql())
    Database(make_url(server.create("migrated"))).close()
    return server


@cache
def _server() -> SeaweedFS:
    bucket.KEPT = 1  # so that blobs are kept for as long as in a directory
    server = _servers.enter_context(seaweedfs())
    os.environ.update(server.environment)
    return server


def read(blobs: Blobs, name: str) -> bytes:
    with blobs.open(name) as reader:
        content = bytearray(reader.size)
        assert reader.read_into(memoryview(content), 0) == len(content)
    return bytes(content)


def replace(blobs: Blobs, name: str, content: bytes) -> None:
    """Replace a blob's bytes, as only a broken disk does."""
    blobs.delete(name)
    blobs.put(name, content)


def spoil(blobs: Blobs, name: str) -> None:
    """Flip one bit in the middle of a blob."""
    content = bytearray(read(blobs, name))
    content[len(content) // 2] ^= 1
    replace(blobs, name, bytes(content))


def names(run: LiveRun, kind: Kind, round_: int | None = None, fragment: int | None = None) -> list[str]:
    """Return the names of a run's blobs of a kind, optionally of one round or fragment."""
    found = sorted(name for name, _ in run.blobs.list(run.names.kind(kind)))
    found = [name for name in found if round_ is None or round_of(name) == round_]
    return [name for name in found if fragment is None or name.split("/")[4].split(".")[0] == str(fragment)]


def the(run: LiveRun, kind: Kind, round_: int, fragment: int) -> str:
    """Return the name of the only blob of a kind, round and fragment."""
    (name,) = names(run, kind, round_, fragment)
    return name


def rounds(run: LiveRun, kind: Kind) -> list[int]:
    """Return the rounds that have blobs of a kind."""
    return sorted({round_of(name) for name in names(run, kind)})


def nothing(name: str) -> None:
    """Do nothing before or after a put."""


@contextmanager
def disturbed(
    run: LiveRun, kind: Kind, before: Callable[[str], object] = nothing, after: Callable[[str], object] = nothing
) -> Iterator[None]:
    """Within the block, call `before` and `after` with the name around each put of the run's blobs of a kind."""
    real = run.blobs
    run.blobs = Disturbed(real, run.names.kind(kind), before, after)
    try:
        yield
    finally:
        run.blobs = real


class Disturbed:
    """Blobs that call `before` and `after` around each put of a name under `prefix`."""

    def __init__(
        self, blobs: Blobs, prefix: str, before: Callable[[str], object], after: Callable[[str], object]
    ) -> None:
        self._blobs, self._prefix, self._before, self._after = blobs, prefix, before, after
        self.direct, self.bucket = blobs.direct, blobs.bucket

    def put(self, name: str, source: Buffer | Path) -> bool:
        if not name.startswith(self._prefix):
            return self._blobs.put(name, source)
        self._before(name)
        created = self._blobs.put(name, source)
        self._after(name)
        return created

    def open(self, name: str, *, fresh: bool = False) -> Reader:
        return self._blobs.open(name, fresh=fresh)

    def fetch(self, name: str, target: Path) -> None:
        self._blobs.fetch(name, target)

    def rename(self, name: str, new_name: str) -> None:
        self._blobs.rename(name, new_name)

    def delete(self, *names: str) -> None:
        self._blobs.delete(*names)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        return self._blobs.list(prefix)

    def stat(self, name: str) -> int | None:
        return self._blobs.stat(name)


class Blocked:
    """Puts of a run's blobs of a kind fail until `unblock` is called."""

    def __init__(self, run: LiveRun, kind: Kind) -> None:
        self._blocked = True
        run.blobs = Disturbed(run.blobs, run.names.kind(kind), self._refuse, nothing)

    def unblock(self) -> None:
        self._blocked = False

    def _refuse(self, name: str) -> None:
        if self._blocked:
            raise NotADirectoryError(name)
