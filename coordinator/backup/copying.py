"""Copying bytes that must have a digest: chunk by chunk, and durable at the end."""

import os
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from coordinator.store.blobs import Reader
from coordinator.store.payloads import READ_BYTES
from outerstep.common.files import Writer


class Interrupted(Exception):
    """The coordinator stops: what was copied stays, and the next backup goes on with it."""


def go_on() -> None:
    """What is called between chunks where nobody interrupts."""


def copy_whole(reader: Reader, target: Path, digest: str, interrupt: Callable[[], object] = go_on) -> bool:
    """Copy what `reader` reads into the new file `target`, durably; return False, and leave none, where it has not this
    BLAKE3 digest or cannot be read. Raises OSError where `target` cannot be written, and what `interrupt` raises."""
    hasher, memory, at = blake3(), memoryview(bytearray(READ_BYTES)), 0
    try:
        # Past the page cache, which is the coordinator's: nobody reads the copy soon.
        with Writer(target, 0o600) as file:
            while count := _read(reader, memory, at):
                interrupt()
                hasher.update(memory[:count])
                file.write(memory[:count])
                at += count
            file.end()
            os.fsync(file.fileno())
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    if hasher.hexdigest() == digest:
        return True
    target.unlink()
    return False


def _read(reader: Reader, memory: memoryview, at: int) -> int:
    """Return how many bytes were read: none at the end, and where the disk cannot read on, which the digest tells."""
    try:
        return reader.read_into(memory, at)
    except OSError:
        return 0
