"""Uploads in parts, over several connections and in any order.

Parts that have arrived are kept while connections break and new ones open. They are dropped once the payload is
complete and processed, or if nothing arrives for KEPT_S seconds. No byte is written twice, so later parts cannot change
an accepted payload.
"""

import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from coordinator.store.blobs import FileReader
from coordinator.store.payloads import READ_BYTES, Body, digest_of
from outerstep.common.files import naming
from outerstep.common.ranges import Range, overlap, without
from protocol.digest import digest
from protocol.errors import Problem

KEPT_S = 300.0
BYTES_PER_OWNER = 4 << 30
RETRY_S = 5.0
MAX_GAPS = 1000  # between the parts of one payload; more than any honest client leaves

Key = tuple[str, str]  # the owner, and the owner's name for the upload


class PartialUpload:
    """A payload of `size` bytes with the BLAKE3 digest `digest`. The parts that have arrived are in `target`: memory or
    a new file."""

    def __init__(self, size: int, digest: bytes, target: memoryview | Path, now: float) -> None:
        self.size, self.digest = size, digest
        self._target, self._lock = target, threading.Lock()
        self._missing: list[Range] = [(0, size)]
        self._gone, self._users = False, 0
        self.corrupt = False  # True if it is complete, and its digest is not the announced one
        self.touched = now

    def add(self, start: int, part: Body) -> list[Range]:
        """Write the missing bytes of [start, start + part.size). Return the ranges that are still missing; if the
        upload was discarded, that is everything. Raises Problem `invalid-message` if the parts leave too many gaps."""
        stop = start + part.size
        with self._lock:
            if self._gone:
                return [(0, self.size)]
            added = overlap(self._missing, start, stop)
            missing = without(self._missing, start, stop)
            if len(missing) > MAX_GAPS:
                raise Problem("invalid-message", f"the parts leave {len(missing)} gaps; at most {MAX_GAPS} are allowed")
            self._write(start, part, added)
            self._missing = missing
            return list(missing)

    def body(self) -> Body:
        """Return the complete payload. Raises Problem `digest-mismatch` if its digest is not the announced one."""
        if isinstance(self._target, memoryview):
            found = digest(self._target)
        else:
            with FileReader(self._target) as reader:
                found = digest_of(reader)
        if found != self.digest:
            self.corrupt = True
            detail = f"the parts together have the digest {found.hex()}, but {self.digest.hex()} was announced"
            raise Problem("digest-mismatch", detail)
        return Body(self._target, self.size, found)

    @property
    def in_file(self) -> bool:
        """True if the bytes are on disk."""
        return isinstance(self._target, Path)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the bytes during the block, even if another thread discards the upload. Two requests may have the
        complete payload at the same time, if a part arrived twice."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                self._free()

    def discard(self) -> None:
        """Drop the bytes. Memory is released once nothing refers to it."""
        with self._lock:
            self._gone = True
            self._free()

    def _free(self) -> None:
        if self._gone and self._users == 0 and isinstance(self._target, Path):
            self._target.unlink(missing_ok=True)

    def _write(self, start: int, part: Body, added: list[Range]) -> None:
        for first, last in added:
            if isinstance(self._target, memoryview):
                part.read_into(self._target[first:last], first - start)
                continue
            descriptor = os.open(self._target, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                for at in range(first, last, READ_BYTES):
                    piece = memoryview(bytearray(min(READ_BYTES, last - at)))
                    part.read_into(piece, at - start)
                    written = 0
                    with naming(self._target):
                        while written < len(piece):
                            written += os.pwrite(descriptor, piece[written:], at + written)
            finally:
                os.close(descriptor)


class PartialUploads:
    """The uploads in progress, one for each key. One owner's uploads have at most `bytes_per_owner` bytes together; a
    single upload may be larger. Thread-safe. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float], bytes_per_owner: int = BYTES_PER_OWNER) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._bytes_per_owner = bytes_per_owner
        self._found: dict[Key, PartialUpload] = {}

    @property
    def waiting(self) -> int:
        """Number of incomplete uploads."""
        return len(self._found)

    def get(
        self,
        key: Key,
        size: int,
        digest: bytes,
        target: Callable[[], memoryview | Path],
        most_bytes: float = math.inf,
    ) -> PartialUpload:
        """Return the upload with this key. Begin a new one in `target` if there is none, or if it has another size or
        digest. Raises Problem `too-many-requests` if the uploads of this owner exceed `most_bytes` or the limit per
        owner.
        """
        now = self._clock()
        with self._lock:
            found = self._found.get(key)
            if found is not None and (found.size, found.digest) == (size, digest):
                found.touched = now
                return found
            others = sum(each.size for other, each in self._found.items() if other[0] == key[0] and other != key)
            if others and others + size > min(self._bytes_per_owner, most_bytes):
                detail = f"other uploads of {others} bytes are incomplete; send the rest of those first"
                raise Problem("too-many-requests", detail, retry_after_s=RETRY_S)
            self._found[key] = made = PartialUpload(size, digest, target(), now)
        if found is not None:
            found.discard()
        return made

    def drop(self, key: Key, whole: PartialUpload) -> None:
        """Forget an upload that was accepted or finally rejected."""
        with self._lock:
            if self._found.get(key) is whole:
                del self._found[key]
        whole.discard()

    def sweep(self, kept_s: float = KEPT_S) -> None:
        """Forget uploads that have received nothing for `kept_s` seconds."""
        before = self._clock() - kept_s
        with self._lock:
            stale = {key: whole for key, whole in self._found.items() if whole.touched < before}
            for key in stale:
                del self._found[key]
        for whole in stale.values():
            with suppress(OSError):  # the next start empties the directory
                whole.discard()
