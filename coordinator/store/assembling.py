"""Payloads that arrive in parts, over several connections and in any order, and are put together here.

What has arrived stays while connections break and others open, until the whole is taken or nothing more has come for
KEPT_S. No byte is written twice: what a whole was accepted with stays as it is, whatever is sent afterwards.
"""

import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coordinator.store.blobs import FileReader
from coordinator.store.payloads import READ_BYTES, Body, digest_of
from outerstep.common.ranges import Range, overlap, without
from protocol.digest import digest
from protocol.errors import Problem

KEPT_S = 300.0
BYTES_PER_OWNER = 4 << 30
RETRY_S = 5.0
MAX_GAPS = 1000  # between the parts of one payload: more than any client of good will leaves

Key = tuple[str, str]  # its owner, and which of the owner's it is


class Whole:
    """One payload of `size` bytes with the BLAKE3 digest `digest`, in `target`: memory, or a new file."""

    def __init__(self, size: int, digest: bytes, target: memoryview | Path, now: float) -> None:
        self.size, self.digest = size, digest
        self._target, self._lock = target, threading.Lock()
        self._missing: list[Range] = [(0, size)]
        self._gone, self._users = False, 0
        self.spoilt = False  # all of it is there, and it is not what was announced
        self.touched = now

    def add(self, start: int, part: Body) -> list[Range]:
        """Take what is missing of [start, start + part.size); return what is still missing, which is all of it once it
        was let go. Problem `invalid-message` for parts that leave too many gaps."""
        stop = start + part.size
        with self._lock:
            if self._gone:
                return [(0, self.size)]
            news = overlap(self._missing, start, stop)
            missing = without(self._missing, start, stop)
            if len(missing) > MAX_GAPS:
                raise Problem("invalid-message", f"the parts leave {len(missing)} gaps; at most {MAX_GAPS} are kept")
            self._write(start, part, news)
            self._missing = missing
            return list(missing)

    def body(self) -> Body:
        """Return all of it. Problem `digest-mismatch` where it is not what was announced."""
        if isinstance(self._target, memoryview):
            found = digest(self._target)
        else:
            with FileReader(self._target) as reader:
                found = digest_of(reader)
        if found != self.digest:
            self.spoilt = True
            detail = f"the parts together have the digest {found.hex()}, announced was {self.digest.hex()}"
            raise Problem("digest-mismatch", detail)
        return Body(self._target, self.size, found)

    @property
    def in_file(self) -> bool:
        """Whether its bytes are on the disk."""
        return isinstance(self._target, Path)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep its bytes for the block, whoever lets go of it meanwhile: a part may come twice at once, and each of the
        two then holds all of it."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._free()

    def discard(self) -> None:
        """Let go of it. Memory is free again as soon as nothing refers to it."""
        with self._lock:
            self._gone = True
            self._free()

    def _free(self) -> None:
        if self._gone and self._users == 0 and isinstance(self._target, Path):
            self._target.unlink(missing_ok=True)

    def _write(self, start: int, part: Body, news: list[Range]) -> None:
        for first, last in news:
            if isinstance(self._target, memoryview):
                part.read_into(self._target[first:last], first - start)
                continue
            descriptor = os.open(self._target, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                for at in range(first, last, READ_BYTES):
                    piece = memoryview(bytearray(min(READ_BYTES, last - at)))
                    part.read_into(piece, at - start)
                    written = 0
                    while written < len(piece):
                        written += os.pwrite(descriptor, piece[written:], at + written)
            finally:
                os.close(descriptor)


class Wholes:
    """The payloads that are being put together, one for each key; `bytes_per_owner` at most of one owner, or one alone.
    Thread-safe. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float], bytes_per_owner: int = BYTES_PER_OWNER) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._bytes_per_owner = bytes_per_owner
        self._found: dict[Key, Whole] = {}

    @property
    def waiting(self) -> int:
        """How many are not all there."""
        return len(self._found)

    def get(
        self,
        key: Key,
        size: int,
        digest: bytes,
        target: Callable[[], memoryview | Path],
        most_bytes: float = math.inf,
    ) -> Whole:
        """Return the payload of this key; a new one in a `target` if there is none, or one of other bytes. Problem
        `too-many-requests` if it and others of its owner are more than `most_bytes`, or than an owner may have."""
        now = self._clock()
        with self._lock:
            found = self._found.get(key)
            if found is not None and (found.size, found.digest) == (size, digest):
                found.touched = now
                return found
            others = sum(each.size for other, each in self._found.items() if other[0] == key[0] and other != key)
            if others and others + size > min(self._bytes_per_owner, most_bytes):
                detail = f"payloads of {others} bytes are not all there yet; send the rest of these first"
                raise Problem("too-many-requests", detail, retry_after_s=RETRY_S)
            self._found[key] = made = Whole(size, digest, target(), now)
        if found is not None:
            found.discard()
        return made

    def drop(self, key: Key, whole: Whole) -> None:
        """Forget a payload that was taken, or refused for good."""
        with self._lock:
            if self._found.get(key) is whole:
                del self._found[key]
        whole.discard()

    def sweep(self) -> None:
        """Forget those to which nothing has come for KEPT_S."""
        before = self._clock() - KEPT_S
        with self._lock:
            stale = {key: whole for key, whole in self._found.items() if whole.touched < before}
            for key in stale:
                del self._found[key]
        for whole in stale.values():
            with suppress(OSError):  # the next start empties the directory
                whole.discard()
