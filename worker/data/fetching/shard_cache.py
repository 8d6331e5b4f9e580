"""A size-limited directory of fetched shards, shared by any number of workers of a machine.

    DIGEST        a complete shard; its bytes were compared with their BLAKE3 before it got this name
    DIGEST.part   a shard that is being fetched, by the process that holds its lock; it has its final size
    lock          held while beginning a part, making room, and renaming a finished part

Files are named by their digest. So workers, runs and sets share identical shards, and none of them can use a wrong one.
The process that fetches a part locks it (flock) until the shard is complete, also between two attempts; others that
want the same shard wait. The kernel releases the locks of a process that ends, and the next process fetches the whole
shard again.

Room is made by deleting the least recently used files that nobody fetches: within an epoch no shard is used again
later, so these are the least needed. What this worker has fetched ahead and not used yet is deleted last. A worker that
has a deleted shard open can still read it.
"""

import copy
import fcntl
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Literal

from blake3 import blake3

from outerstep.common.connections import error_text
from outerstep.common.files import FULL, free_bytes, naming, try_lock
from outerstep.common.quantities import bytes_text
from protocol.errors import Transient
from worker.data.tokens.token_files import digest_of
from worker.errors import DataError, Stopped
from worker.line.retry import Retry, Signal

_LOCK_POLL_S = 0.2  # while another worker fetches the same shard
_PART = ".part"
_NAME = re.compile(r"[0-9a-f]{64}(\.part)?")

log = logging.getLogger(__name__)


def cache_directory(kind: Literal["data", "shards"]) -> Path:
    """Return the default cache directory for prepared token sets ("data") or for fetched shards ("shards")."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outerstep" / kind


@dataclass(frozen=True)
class RemoteShard:
    """A shard to fetch: its BLAKE3 and its size in bytes. `read` yields its bytes; `name` is for messages."""

    digest: str
    size: int
    name: str
    read: Callable[[], Iterator[bytes]]


class ShardCache:
    """The cache in `directory`, of at most `limit_bytes`. Thread-safe. Transient faults are retried by `retry`. Raises
    DataError immediately if the directory is not writable."""

    def __init__(self, directory: Path, limit_bytes: int, retry: Retry) -> None:
        self._directory, self.limit_bytes, self.retry = directory, limit_bytes, retry
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
            self.fetch(shard, keep)
            try:
                file = (self._directory / shard.digest).open("rb", buffering=0)
            except FileNotFoundError:
                continue  # another worker has deleted it again
            if self._matches(shard, file):
                os.utime(file.fileno())
                return file
            file.close()
            log.warning("%s in the data cache is damaged; fetching it again", file.name)
            with self._locked():
                (self._directory / shard.digest).unlink(missing_ok=True)

    def fetch(self, shard: RemoteShard, keep: Collection[str] = ()) -> None:
        """Fetch a shard unless it is in the directory. `keep` is that of `open`. Raises DataError and Stopped."""
        try:
            while not (self._directory / shard.digest).exists():
                with self._part(shard) as part:
                    if part is None:
                        self.retry.pause(_LOCK_POLL_S)
                    else:
                        self.retry(partial(self._try, shard, part, keep))
        except OSError as error:
            raise self._unusable(error) from error

    def _matches(self, shard: RemoteShard, file: IO[bytes]) -> bool:
        if shard.digest not in self._verified:
            if digest_of(file, shard.size + 1) != (shard.digest, shard.size):  # it may be longer
                return False
            file.seek(0)
            self._verified.add(shard.digest)
        return True

    @contextmanager
    def _part(self, shard: RemoteShard) -> Iterator[IO[bytes] | None]:
        """Open and lock the part of a shard. None if the shard is complete, or if another worker fetches it."""
        path = self._directory / f"{shard.digest}{_PART}"
        with ExitStack() as opened:
            found = None
            with self._locked():
                if not (self._directory / shard.digest).exists():
                    path.touch()
                    part = opened.enter_context(path.open("r+b", buffering=0))
                    found = part if try_lock(part) else None
            yield found

    def _try(self, shard: RemoteShard, part: IO[bytes], keep: Collection[str]) -> None:
        """Try once to fetch the whole shard. Raises Transient if there is no room for it."""
        try:
            with self._locked():
                self._make_room(shard, keep)
                part.truncate(shard.size)
            hasher = blake3()
            part.seek(0)
            for chunk in shard.read():
                if self.retry.stop.is_set():
                    raise Stopped("stopped while fetching a shard")
                _write(part, chunk)
                hasher.update(chunk)
            if hasher.hexdigest() != shard.digest:
                raise DataError(
                    f"{shard.name} does not match its index: BLAKE3 {hasher.hexdigest()}, not {shard.digest}: it was "
                    "altered; upload the set again"
                )
            os.fsync(part.fileno())
            with self._locked():
                os.rename(str(part.name), self._directory / shard.digest)
            self._verified.add(shard.digest)
        except OSError as error:
            if error.errno not in FULL:
                raise
            with self._locked():
                self._delete(shard.size, shard, keep)
            room = f"{bytes_text(shard.size)} are needed, {bytes_text(free_bytes(self._directory))} free"
            raise Transient(f"the disk of the data cache {self._directory} is full: {room}") from error

    def _make_room(self, shard: RemoteShard, keep: Collection[str]) -> None:
        """Delete until there is room for the shard. Raises Transient if others are being fetched in all of it."""
        used = sum(path.stat().st_size for path in self._others(shard))
        if self._delete(used + shard.size - self.limit_bytes, shard, keep) > 0:
            raise Transient(
                f"the data cache {self._directory} of {self.limit_bytes / 1e9:.3g} GB has no room for another "
                f"{shard.size / 1e9:.3g} GB while other shards are being fetched; raise the limit with "
                "OUTERSTEP_DATA_CACHE_GB"
            )

    def _delete(self, wanted_bytes: int, shard: RemoteShard, keep: Collection[str]) -> int:
        """Delete the least recently used of the other shards until that many bytes are free, those in `keep` last.
        Return how many bytes are still wanted."""
        others = [(path.name in keep, path.stat().st_mtime, path) for path in self._others(shard)]
        for _, _, path in sorted(others):
            if wanted_bytes <= 0:
                break
            with path.open("rb") as file:
                if path.suffix == _PART and not try_lock(file):
                    continue  # it is being fetched
                wanted_bytes -= os.fstat(file.fileno()).st_size
                path.unlink()
        return wanted_bytes

    def _others(self, shard: RemoteShard) -> list[Path]:
        """Return the files of other shards, complete or not."""
        return [path for path in self._directory.iterdir() if _NAME.fullmatch(path.name) and path.stem != shard.digest]

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
            f"the data cache {self._directory} cannot be written: {error_text(error)}; set "
            "OUTERSTEP_DATA_CACHE to another directory"
        )


def _write(file: IO[bytes], chunk: bytes) -> None:
    view = memoryview(chunk)
    with naming(Path(file.name)):
        while view:  # a raw file may write only a part of it
            view = view[file.write(view) :]
