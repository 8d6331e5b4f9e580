"""Payloads: reading them chunk by chunk from blobs and local files, and a budget for those that stay in memory."""

import asyncio
import hashlib
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from blake3 import blake3

from coordinator.store.blobs import Blobs, FileReader, Reader, StoreOutage
from outerstep.common.connections import error_text
from outerstep.common.files import aligned
from protocol.wire import Payload

READ_BYTES = 1 << 20  # of a file, at a time
CONTRIBUTIONS_BYTES = 96 << 20
DELTAS_BYTES = 24 << 20
# If memory was freed less than this many seconds ago, more is likely to follow. On fast networks fragments are averaged
# in quick succession, so memory is freed at shorter intervals. On slow ones few uploads begin so soon after that.
FREES_UP_WITHIN_S = 0.3
POLL_S, LONGEST_S = 0.01, 1.0  # between attempts to get memory, and of all together


class ReadBuffer:
    """Memory for reading payloads, reused for every read: allocating would cost as much as reading."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def of(self, length: int) -> memoryview:
        """Return `length` bytes of memory, valid until the next call."""
        if len(self._memory) < length:
            self._memory = memoryview(bytearray(length))
        return self._memory[:length]


class StoredPayload(Payload):
    """A payload with one chunk in memory at a time, so one can be open for every worker.

    It closes its `reader`. Several payloads may share `memory`; a chunk is valid until the next one is read into it.
    """

    def __init__(self, reader: Reader, memory: ReadBuffer | None = None) -> None:
        self._reader, self._memory = reader, memory or ReadBuffer()
        try:
            super().__init__(self._read, reader.size)
        except BaseException:
            reader.close()
            raise

    def _read(self, offset: int, length: int) -> memoryview:
        block = self._memory.of(length)
        return block[: self._reader.read_into(block, offset)]

    def close(self) -> None:
        self._reader.close()
        self._memory = ReadBuffer()  # frees the memory, because the request may live much longer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HashedPayload(StoredPayload):
    """A payload that is read once, in order, and hashed while it is read."""

    def __init__(self, reader: Reader, memory: ReadBuffer) -> None:
        self._hasher, self._hashed_bytes = blake3(), 0
        super().__init__(reader, memory)

    def _read(self, offset: int, length: int) -> memoryview:
        data = super()._read(offset, length)
        if offset == self._hashed_bytes:
            self._hasher.update(data)
            self._hashed_bytes += len(data)
        return data

    def is_intact(self, digest: bytes) -> bool:
        """Return True if the whole payload was read, in order, and has this BLAKE3 digest."""
        return self._hashed_bytes == self.total_bytes and self._hasher.digest() == digest


@dataclass(frozen=True)
class Body:
    """The body of an upload: a payload of `size` bytes that is not yet durable, in memory or in a local file."""

    source: memoryview | Path
    size: int
    digest: bytes

    @property
    def content(self) -> memoryview | None:
        """The bytes, if they are in memory."""
        return self.source if isinstance(self.source, memoryview) else None

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the bytes from `offset` on. Raises OSError if there are too few bytes."""
        if isinstance(self.source, memoryview):
            memory[:] = self.source[offset : offset + len(memory)]
            return
        with FileReader(self.source) as reader:
            if reader.read_into(memory, offset) != len(memory):
                raise OSError(f"{self.source} ends before byte {offset + len(memory)}")

    @contextmanager
    def payload(self) -> Iterator[Payload]:
        """Open the payload for reading. Raises WireError."""
        if isinstance(self.source, memoryview):
            yield Payload.from_bytes(self.source)
        else:
            with StoredPayload(FileReader(self.source)) as payload:
                yield payload


def digest_of(reader: Reader) -> bytes:
    """Return the BLAKE3 digest of everything that `reader` reads."""
    return _digest(reader, blake3())


def sha256_of(reader: Reader) -> bytes:
    """Return the SHA-256 digest of everything that `reader` reads."""
    return _digest(reader, hashlib.sha256())


def _digest(reader: Reader, hasher: Any) -> bytes:
    memory, at = memoryview(bytearray(READ_BYTES)), 0
    while count := reader.read_into(memory, at):
        hasher.update(memory[:count])
        at += count
    return bytes(hasher.digest())


def has_digest(blobs: Blobs, name: str, digest: bytes) -> bool:
    """Return True if the blob exists, can be read and has this BLAKE3 digest."""
    return fault_in(blobs, name, digest) is None


def fault_in(blobs: Blobs, name: str, digest: bytes) -> str | None:
    """Return what is wrong with a blob that should have this BLAKE3 digest: "missing", "corrupt" or "unreadable (why)".
    None if it is intact. Raises StoreOutage."""
    try:
        with blobs.open(name, fresh=True) as reader:
            return None if digest_of(reader) == digest else "corrupt"
    except FileNotFoundError:
        return "missing"
    except StoreOutage:
        raise  # the blob may be intact
    except OSError as error:
        return f"unreadable ({error_text(error)})"


# --- in memory --------------------------------------------------------------------------------------------------------


class MemoryBudget:
    """Limits the memory for payloads: contributions from their first byte until they are averaged, and the newest
    deltas, which all workers fetch soon after their publication.

    A payload in memory can be checked, averaged, applied or sent without reading a file; all others are read from their
    files. So memory is bounded, no matter how many workers there are and how slow they are. Deltas may use
    `deltas_bytes`, and as much of `contributions_bytes` as contributions leave free. The limit does not depend on the
    number of workers. Thread-safe. `clock` returns seconds.
    """

    def __init__(
        self,
        contributions_bytes: int = CONTRIBUTIONS_BYTES,
        deltas_bytes: int = DELTAS_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.contributions_bytes, self._deltas_own_bytes = contributions_bytes, deltas_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._free_bytes = contributions_bytes
        self._freed_at = -FREES_UP_WITHIN_S
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()  # by owner
        self._held: Counter[str] = Counter()  # bytes by owner
        self._returned: deque[tuple[str, int]] = deque()  # added by finalizers, which must not wait for a lock
        self._deltas: OrderedDict[bytes, memoryview] = OrderedDict()  # by digest, the oldest first
        self._deltas_bytes = 0

    def take(self, size: int, owner: str = "", owners: int = 1) -> memoryview | None:
        """Return memory for a contribution of `size` bytes; None if the budget does not allow it. After its first one,
        each of `owners` has an equal share: who is ahead leaves the others what they need to catch up. The memory
        returns to the budget as soon as nothing refers to it.
        """
        with self._lock:
            self._take_back()
            held = self._held[owner]
            if size > self._free_bytes or (held and (held + size) * owners > self.contributions_bytes):
                return None
            self._free_bytes -= size
            self._held[owner] = held + size
            self._drop_deltas()
        memory = aligned(size)
        weakref.finalize(memory.obj, self._returned.append, (owner, size)).atexit = False
        return memory

    async def take_soon(self, size: int, owner: str, owners: int) -> memoryview | None:
        """Like `take`, but wait a moment if others are about to return theirs, because that is cheaper than using a
        file. An owner's payloads get memory in the order of the calls, since they are averaged in about that order."""
        async with self._turns.setdefault(owner, asyncio.Lock()):
            content, until = self.take(size, owner, owners), self._clock() + LONGEST_S
            while content is None and self.frees_up(size) and self._clock() < until:
                await asyncio.sleep(POLL_S)
                content = self.take(size, owner, owners)
            return content

    def frees_up(self, size: int) -> bool:
        """Return True if `size` bytes may be available soon, because some memory was freed just now."""
        return size <= self.contributions_bytes and self._clock() - self._freed_at < FREES_UP_WITHIN_S

    def add_delta(self, digest: bytes, delta: memoryview) -> None:
        """Keep `delta`, whose BLAKE3 digest is `digest`, until newer deltas or contributions need its memory."""
        with self._lock:
            if digest in self._deltas:
                return
            self._deltas[digest] = delta
            self._deltas_bytes += len(delta)
            self._take_back()
            self._drop_deltas()

    def delta(self, digest: bytes) -> memoryview | None:
        """Return the delta with this digest if it is still in memory, else None."""
        with self._lock:
            return self._deltas.get(digest)

    def _take_back(self) -> None:
        while self._returned:
            owner, size = self._returned.popleft()
            self._free_bytes += size
            self._held[owner] -= size
            self._freed_at = self._clock()
        self._held = +self._held  # without those who hold nothing

    def _drop_deltas(self) -> None:
        while self._deltas_bytes > self._deltas_own_bytes + self._free_bytes:
            _, oldest = self._deltas.popitem(last=False)
            self._deltas_bytes -= len(oldest)
