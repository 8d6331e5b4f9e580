"""A bounded directory of shards that were fetched: any number of workers of a machine share it.

    DIGEST              a shard, whole: its bytes were compared with their BLAKE3 before it had this name
    DIGEST.BYTES.part   one that is being fetched, of BYTES in the end, by whoever has it locked
    lock                held while room is made, a part begun or a shard given its name

Files are named by their digest, so workers, runs and sets have a shard in common where it is the same, and none of them
can have a wrong one. A part is locked (flock) by its fetcher: whoever wants the same shard waits for it instead of
fetching it again. The kernel frees locks with their process, so a part whose fetcher was killed is gone on with by the
next one, from where it ends. A part counts with the bytes that it will have, and one lock is held from counting to
beginning, so the directory's limit holds however many workers fetch.

Room is made by deleting what was used longest ago: in an epoch no shard comes back, so that is what is least needed.
Who has a shard open goes on reading it when another worker's room was made of it. What is fetched ahead leaves room for
what is needed sooner and not begun, whichever thread comes first: it would be deleted for that again.
"""

import copy
import errno
import fcntl
import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from blake3 import blake3

from outerstep.common.files import try_lock
from protocol.errors import Transient
from worker.errors import DataError, NoRoom, Stopped
from worker.line.retry import Retry, Signal

_PIECE_BYTES = 1 << 20
_LOOK_AGAIN_S = 0.2  # where another worker fetches what is wanted
_NAME = re.compile(r"[0-9a-f]{64}(\.(?P<bytes>\d+)\.part)?")
_FULL = {errno.ENOSPC, errno.EDQUOT}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """A shard: its BLAKE3 and length; `read` yields its bytes from any byte on, and `name` is for people."""

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
        """Delete it, unless it is just being fetched; return whether it is gone."""
        if self.path.suffix != ".part":
            self.path.unlink(missing_ok=True)
            return True
        try:
            with self.path.open("rb") as part:
                if not try_lock(part):
                    return False
                self.path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass  # finished, or deleted by another worker
        return True


class ShardCache:
    """The shards in `directory`, which take `limit_bytes` at most. Any thread may use it. `retry` says how long what is
    transient is tried again. Raises DataError, at once, if it cannot be written."""

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
        """Return the same with another signal that ends fetching and waiting."""
        other = copy.copy(self)
        other.retry = self.retry.until(stop)
        return other

    def open(self, wanted: Wanted, keep: Collection[str] = ()) -> IO[bytes]:
        """Return the file of a shard, fetched if it has to be, its bytes compared with its digest once by this process.

        Room is made of the digests in `keep` only if there is no other. Raises DataError and Stopped.
        """
        while True:
            try:
                file = (self._directory / wanted.digest).open("rb", buffering=0)
            except FileNotFoundError:
                self.retry(lambda: self._fetch_in_any_case(wanted, keep))
                continue  # somebody may have made room of it already
            if self._is_right(wanted, file):
                os.utime(file.fileno())
                return file
            file.close()
            log.warning("%s of the data cache is not what it was: it is fetched again", file.name)
            Path(str(file.name)).unlink(missing_ok=True)

    def fetch(self, wanted: Wanted, before: Collection[Wanted] = ()) -> None:
        """Have a shard in the directory. Raises DataError, Stopped, and NoRoom if there is no room but where those in
        `before` are or will be."""
        if not (self._directory / wanted.digest).exists():
            self.retry(lambda: self._fetch(wanted, {each.digest: each.size for each in before}))

    def _is_right(self, wanted: Wanted, file: IO[bytes]) -> bool:
        if wanted.digest not in self._verified:
            hasher = blake3()
            if _hash_into(hasher, file) != wanted.size or hasher.hexdigest() != wanted.digest:
                return False
            file.seek(0)
            self._verified.add(wanted.digest)
        return True

    def _fetch_in_any_case(self, wanted: Wanted, keep: Collection[str]) -> None:
        try:
            self._fetch(wanted, dict.fromkeys(keep, 0))  # nothing is needed sooner
        except NoRoom:
            try:
                self._fetch(wanted, {})
            except NoRoom as error:  # other workers fetch: they will be through
                raise Transient(str(error)) from error

    def _fetch(self, wanted: Wanted, keep: Mapping[str, int]) -> None:
        """Try once, from where the last try broke off. Digests in `keep` are not deleted, and those that are not there
        have so many bytes of room left."""
        try:
            self._try(wanted, keep)
        except OSError as error:
            if error.errno not in _FULL:
                raise self._unusable(error) from error
            with self._locked():
                self._delete(wanted.size, keep)
            raise Transient(f"the disk of the data cache {self._directory} is full") from error

    def _try(self, wanted: Wanted, keep: Mapping[str, int]) -> None:
        with self._part(wanted, keep) as part:
            if part is None:
                return
            hasher = blake3()
            begun = size = _hash_into(hasher, part)
            for piece in wanted.read(size) if size < wanted.size else ():
                if self.retry.stop.is_set():
                    raise Stopped("asked to stop while a shard was fetched")
                _write(part, piece)
                hasher.update(piece)
                size += len(piece)
            if size < wanted.size:
                raise Transient(f"{wanted.name} broke off after {size} of {wanted.size} bytes")
            if hasher.hexdigest() != wanted.digest:
                part.truncate(0)
                fault = f"{wanted.name} is not what its index says: BLAKE3 {hasher.hexdigest()}, not {wanted.digest}"
                if begun:  # by somebody whose bytes may not have reached the disk
                    raise Transient(f"{fault}; it is fetched anew")
                raise DataError(f"{fault}: it was altered; put the set there again")
            os.fsync(part.fileno())
            with self._locked():  # so that whoever makes room, or begins the same shard, sees the one or the other
                os.rename(str(part.name), self._directory / wanted.digest)
            self._verified.add(wanted.digest)

    @contextmanager
    def _part(self, wanted: Wanted, keep: Mapping[str, int]) -> Iterator[IO[bytes] | None]:
        """Open and lock the part of a shard, at its end; None if the shard is there by then."""
        path = self._directory / f"{wanted.digest}.{wanted.size}.part"
        while True:
            with self._locked():
                if (self._directory / wanted.digest).exists():
                    break
                if not path.exists():
                    self._make_room(wanted, keep)
                part = path.open("ab+", buffering=0)
            with part:
                if not try_lock(part):
                    self.retry.pause(_LOOK_AGAIN_S)
                elif _is_at(part, path):  # and was neither finished nor deleted meanwhile
                    yield part
                    return
        yield None

    def _make_room(self, wanted: Wanted, keep: Mapping[str, int]) -> None:
        """Delete until there is room for what is wanted, and what is missing of `keep`. Raises NoRoom."""
        entries, needed = self._entries(), {**keep, wanted.digest: wanted.size}
        missing = needed.keys() - {entry.digest for entry in entries}
        excess = sum(entry.size for entry in entries) + sum(needed[digest] for digest in missing) - self.limit_bytes
        most = sum(entry.size for entry in entries if entry.digest not in keep)
        if excess > 0 and (excess > most or self._delete(excess, keep) < excess):
            raise NoRoom(
                f"the data cache {self._directory} of {self.limit_bytes / 1e9:.3g} GB has no room for another "
                f"{wanted.size / 1e9:.3g} GB: all that is in it is needed, or being fetched; give it more by "
                "--data-cache-gb"
            )

    def _delete(self, wanted_bytes: int, keep: Collection[str]) -> int:
        """Delete what was used longest ago, but for `keep`, until that many bytes are free; return how many are."""
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
        return DataError(f"the data cache {self._directory} cannot be written: {error}; name another --data-cache")


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _write(file: IO[bytes], piece: bytes) -> None:
    view = memoryview(piece)
    while view:  # a raw file may take less than all of it
        view = view[file.write(view) :]


def _hash_into(hasher: blake3, file: IO[bytes]) -> int:
    """Hash a file from its beginning; return its size."""
    file.seek(0)
    size = 0
    while piece := file.read(_PIECE_BYTES):
        hasher.update(piece)
        size += len(piece)
    return size
