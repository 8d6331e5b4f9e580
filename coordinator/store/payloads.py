"""Payloads in blobs and local files: read chunk by chunk, so that they never have to fit into memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from blake3 import blake3

from coordinator.store.blobs import Blobs, FileReader, Reader
from protocol.wire import Payload

READ_BYTES = 1 << 20


class ReadBuffer:
    """Memory into which payloads are read, used again for every read: allocating would cost as much as reading."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def of(self, length: int) -> memoryview:
        """Return `length` bytes of memory, valid until the next call."""
        if len(self._memory) < length:
            self._memory = memoryview(bytearray(length))
        return self._memory[:length]


class StoredPayload(Payload):
    """A payload of which one chunk at a time is in memory: as many may be open as there are workers.

    It closes its `reader`. Several may share their `memory`; a chunk is valid until the next one is read into it.
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
        self._memory = ReadBuffer()  # frees it: the request that read from it may live much longer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HashedPayload(StoredPayload):
    """A payload that is read once, chunk after chunk, and hashed in passing."""

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
        """Return True if all of it was read, in order, and has this BLAKE3 digest."""
        return self._hashed_bytes == self.total_bytes and self._hasher.digest() == digest


@dataclass(frozen=True)
class Body:
    """The body of an upload: a payload, not yet durable, in memory or in a local file of so many bytes."""

    source: memoryview | Path
    size: int
    digest: bytes

    @property
    def content(self) -> memoryview | None:
        """The bytes, if they are in memory."""
        return self.source if isinstance(self.source, memoryview) else None

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with the bytes from `offset` on. OSError where there are not so many."""
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
    """Return the BLAKE3 digest of what the reader reads."""
    hasher, memory, at = blake3(), memoryview(bytearray(READ_BYTES)), 0
    while count := reader.read_into(memory, at):
        hasher.update(memory[:count])
        at += count
    return hasher.digest()


def has_digest(blobs: Blobs, name: str, digest: bytes) -> bool:
    """Return True if the blob is there, can be read and has this BLAKE3 digest."""
    return fault_in(blobs, name, digest) is None


def fault_in(blobs: Blobs, name: str, digest: bytes) -> str | None:
    """Return what is wrong with a blob of this BLAKE3 digest, as in "the delta of round 3 is missing on disk"; None if
    it is intact."""
    try:
        with blobs.open(name) as reader:
            return None if digest_of(reader) == digest else "corrupt"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"unreadable ({error.strerror})"
