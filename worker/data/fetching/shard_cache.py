"""A size-limited directory of fetched shards, shared by any number of workers of a machine.

    DIGEST              a complete shard; its bytes were compared with their BLAKE3 before it got this name
    DIGEST.BYTES.part   a shard of BYTES bytes that is being fetched, by the process that holds its lock
    lock                held while making room, beginning a part, or renaming a finished part

Files are named by their digest. So workers, runs and sets share identical shards, and none of them can use a wrong one.
The process that fetches a part locks it (flock); others that want the same shard wait instead of fetching it again. The
kernel releases the locks of a process that ends, so the next process resumes the part of one that was killed. A part
counts with its final size, and the same lock is held while counting and beginning a part, so the size limit holds
however many workers fetch. If a server asks to wait (Retry-After), the part's modification time is set to the end of
that time, before which nobody asks for the shard again.

Room is made by deleting the least recently used shards: within an epoch no shard is used again later, so these are the
least needed. A worker that has a deleted shard open can still read it. A prefetched shard leaves room for shards that
are needed sooner and not begun yet, whichever thread runs first; it would otherwise be deleted for them.
"""

import copy
import fcntl
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from blake3 import blake3

from outerstep.common.connections import error_text
from outerstep.common.files import FULL, free_bytes, naming, try_lock
from outerstep.common.quantities import bytes_text
from protocol.errors import Transient
from worker.errors import DataError, NoRoom, Stopped
from worker.line.retry import RETRY_AFTER_CAP_S, Retry, Signal

_CHUNK_BYTES = 1 << 20
_LOCK_POLL_S = 0.2  # while another worker fetches the same shard
_NAME = re.compile(r"[0-9a-f]{64}(\.(?P<bytes>\d+)\.part)?")

log = logging.getLogger(__name__)


def cache_directory(kind: Literal["data", "shards"]) -> Path:
    """Return the default cache directory for prepared token sets ("data") or for fetched shards ("shards")."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outerstep" / kind


@dataclass(frozen=True)
class RemoteShard:
    """A shard to fetch: its BLAKE3 and its size in bytes. `read(start)` yields its bytes from `start`; `name` is for
    messages."""

    digest: str
    size: int
    name: str
    read: Callable[[int], Iterator[bytes]]


@dataclass(frozen=True)
class _Entry:
    path: Path
    size: int
    used: float

    @property
    def digest(self) -> str:
        return self.path.name.partition(".")[0]

    def delete(self) -> bool:
        """Delete the file unless it is being fetched. Return whether it is gone."""
        if self.path.suffix != ".part":
            self.path.unlink(missing_ok=True)
            return True
        try:
            with self.path.open("rb") as part:
                if not try_lock(part):
                    return False
                self.path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass  # another worker finished or deleted it
        return True


class ShardCache:
    """The cache in `directory`, of at most `limit_bytes`. Thread-safe. Transient faults are retried by `retry`. Raises
    DataError immediately if the directory is not writable."""

    def __init__(self, directory: Path, limit_bytes: int, retry: Retry, clock: Callable[[], float] = time.time) -> None:
        self._directory, self.limit_bytes, self.retry, self._clock = directory, limit_bytes, retry, clock
        self._verified: set[str] = set()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with self._locked():
                pass
        except OSError as error:
            raise self._unusable(error) from error

    def until(self, stop: Signal) -> "ShardCache":
        """Return the same cache with another signal that ends fetching and waiting."""
        other = copy.copy(self)
        other.retry = self.retry.until(stop)
        return other

    def open(self, shard: RemoteShard, keep: Collection[str] = ()) -> IO[bytes]:
        """Return the open file of a shard, fetched if necessary. Each process compares its bytes with its digest once.

        Shards whose digests are in `keep` are deleted only if there is no other room. Raises DataError and Stopped.
        """
        while True:
            try:
                file = (self._directory / shard.digest).open("rb", buffering=0)
            except FileNotFoundError:
                self.retry(lambda: self._fetch_with_priority(shard, keep))
                continue  # another worker may have deleted it again
            if self._matches(shard, file):
                os.utime(file.fileno())
                return file
            file.close()
            log.warning("%s in the data cache is damaged; fetching it again", file.name)
            Path(str(file.name)).unlink(missing_ok=True)

    def fetch(self, shard: RemoteShard, before: Collection[RemoteShard] = ()) -> None:
        """Fetch a shard unless it is in the directory. Raises DataError, Stopped, and NoRoom if the only room is what
        the shards in `before` occupy or will occupy."""
        if not (self._directory / shard.digest).exists():
            self.retry(lambda: self._fetch(shard, {each.digest: each.size for each in before}))

    def _matches(self, shard: RemoteShard, file: IO[bytes]) -> bool:
        if shard.digest not in self._verified:
            hasher = blake3()
            if _hash_into(hasher, file) != shard.size or hasher.hexdigest() != shard.digest:
                return False
            file.seek(0)
            self._verified.add(shard.digest)
        return True

    def _fetch_with_priority(self, shard: RemoteShard, keep: Collection[str]) -> None:
        try:
            self._fetch(shard, dict.fromkeys(keep, 0))  # no shard is needed sooner
        except NoRoom:
            try:
                self._fetch(shard, {})
            except NoRoom as error:  # until other workers have finished fetching
                raise Transient(str(error)) from error

    def _fetch(self, shard: RemoteShard, keep: Mapping[str, int]) -> None:
        """Try once, resuming where the last attempt ended. Shards with a digest in `keep` are not deleted; for those
        that are missing, room of the given number of bytes is left free."""
        try:
            self._try(shard, keep)
        except OSError as error:
            if error.errno not in FULL:
                raise self._unusable(error) from error
            with self._locked():
                self._delete(shard.size, keep)
            room = f"{bytes_text(shard.size)} are needed, {bytes_text(free_bytes(self._directory))} free"
            raise Transient(f"the disk of the data cache {self._directory} is full: {room}") from error

    def _try(self, shard: RemoteShard, keep: Mapping[str, int]) -> None:
        with self._part(shard, keep) as part:
            if part is None:
                return
            hasher = blake3()
            begun = size = _hash_into(hasher, part)
            for chunk in self._read(shard, size, part) if size < shard.size else ():
                if self.retry.stop.is_set():
                    raise Stopped("stopped while fetching a shard")
                _write(part, chunk)
                hasher.update(chunk)
                size += len(chunk)
            if size < shard.size:
                raise Transient(f"{shard.name}: the transfer ended after {size} of {shard.size} bytes")
            if hasher.hexdigest() != shard.digest:
                part.truncate(0)
                fault = f"{shard.name} does not match its index: BLAKE3 {hasher.hexdigest()}, not {shard.digest}"
                if begun:  # by a process whose bytes may not have reached the disk
                    raise Transient(f"{fault}; fetching it from the beginning")
                raise DataError(f"{fault}: it was altered; upload the set again")
            os.fsync(part.fileno())
            with self._locked():  # a process making room or beginning the same shard sees either the part or the shard
                os.rename(str(part.name), self._directory / shard.digest)
            self._verified.add(shard.digest)

    def _read(self, shard: RemoteShard, start: int, part: IO[bytes]) -> Iterator[bytes]:
        """Yield the shard's bytes from `start`, unless its server has asked any fetcher to wait, and remember if it
        asks now. Raises Transient."""
        wait_s = os.fstat(part.fileno()).st_mtime - self._clock()
        if 0 < wait_s <= RETRY_AFTER_CAP_S:  # longer: the clock was set back
            raise Transient(f"{shard.name}: the server has asked to wait", retry_after_s=wait_s)
        try:
            yield from shard.read(start)
        except Transient as error:
            if error.retry_after_s is not None:
                until = self._clock() + min(error.retry_after_s, RETRY_AFTER_CAP_S)
                os.utime(part.fileno(), (until, until))
            raise

    @contextmanager
    def _part(self, shard: RemoteShard, keep: Mapping[str, int]) -> Iterator[IO[bytes] | None]:
        """Open and lock the part of a shard, positioned at its end. None if the shard is complete by then."""
        path = self._directory / f"{shard.digest}.{shard.size}.part"
        while True:
            with self._locked():
                if (self._directory / shard.digest).exists():
                    break
                if not path.exists():
                    self._make_room(shard, keep)
                part = path.open("ab+", buffering=0)
            with part:
                if not try_lock(part):
                    self.retry.pause(_LOCK_POLL_S)
                elif _is_at(part, path):  # and it was neither finished nor deleted meanwhile
                    yield part
                    return
        yield None

    def _make_room(self, shard: RemoteShard, keep: Mapping[str, int]) -> None:
        """Delete until there is room for the shard and for the missing shards of `keep`. Raises NoRoom."""
        entries, needed = self._entries(), {**keep, shard.digest: shard.size}
        missing = needed.keys() - {entry.digest for entry in entries}
        excess = sum(entry.size for entry in entries) + sum(needed[digest] for digest in missing) - self.limit_bytes
        most = sum(entry.size for entry in entries if entry.digest not in keep)
        if excess > 0 and (excess > most or self._delete(excess, keep) < excess):
            raise NoRoom(
                f"the data cache {self._directory} of {self.limit_bytes / 1e9:.3g} GB has no room for another "
                f"{shard.size / 1e9:.3g} GB: all of its shards are needed or being fetched; raise the limit with "
                "--data-cache-gb"
            )

    def _delete(self, wanted_bytes: int, keep: Collection[str]) -> int:
        """Delete the least recently used shards that are not in `keep` until that many bytes are free. Return the bytes
        freed."""
        freed = 0
        for entry in sorted(self._entries(), key=lambda entry: entry.used):
            if freed >= wanted_bytes:
                break
            if entry.digest not in keep and entry.delete():
                freed += entry.size
        return freed

    def _entries(self) -> list[_Entry]:
        entries = []
        for path in self._directory.iterdir():
            if match := _NAME.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    entries.append(_Entry(path, int(match["bytes"] or status.st_size), status.st_mtime))
        return entries

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = os.open(self._directory / "lock", os.O_RDONLY | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _unusable(self, error: OSError) -> DataError:
        return DataError(
            f"the data cache {self._directory} cannot be written: {error_text(error)}; choose another --data-cache"
        )


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _write(file: IO[bytes], chunk: bytes) -> None:
    view = memoryview(chunk)
    with naming(Path(file.name)):
        while view:  # a raw file may write only a part of it
            view = view[file.write(view) :]


def _hash_into(hasher: blake3, file: IO[bytes]) -> int:
    """Hash a whole file. Return its size."""
    file.seek(0)
    size = 0
    while chunk := file.read(_CHUNK_BYTES):
        hasher.update(chunk)
        size += len(chunk)
    return size
