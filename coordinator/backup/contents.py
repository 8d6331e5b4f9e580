"""Files and blobs with the content that a manifest names: measured, verified, copied. For backups in a directory
(`directory.py`) and in a bucket (`bucket.py`)."""

import os
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3

from coordinator.backup.manifest import Content, Manifest, decode
from coordinator.store.blobs import FileReader, Reader, StoreOutage
from coordinator.store.payloads import READ_BYTES, digest_of
from outerstep.common.files import Writer
from protocol.errors import OuterstepError


class DamagedBackup(OuterstepError):
    """A backup is incomplete or corrupt; the message explains how."""


class BackupInterrupted(Exception):
    """The coordinator is stopping. Blobs that were copied are kept, and the next backup continues from there."""


def never_interrupt() -> None:
    """Do nothing: the `interrupt` argument of a backup that must not be interrupted."""


def manifest_of(content: bytes, number: int) -> Manifest:
    """Decode the manifest of backup `number`. Raises DamagedBackup."""
    try:
        manifest = decode(content)
    except ValueError as error:
        raise DamagedBackup(str(error)) from error
    if manifest.number != number:
        raise DamagedBackup(f"its manifest is that of backup {manifest.number}")
    return manifest


def is_whole(opened: Callable[[], Reader], content: Content) -> bool:
    """Return True if the reader that `opened` returns can be read and has this content. Raises StoreOutage, which says
    nothing about the content."""
    try:
        with opened() as reader:
            return reader.size == content.size and digest_of(reader).hex() == content.digest
    except StoreOutage:
        raise
    except OSError:
        return False


def content_of(path: Path) -> Content:
    """Return the digest and size of a file."""
    with FileReader(path) as reader:
        return Content(digest=digest_of(reader).hex(), size=reader.size)


def copy_whole(reader: Reader, target: Path, digest: str, interrupt: Callable[[], object] = never_interrupt) -> bool:
    """Copy the bytes of `reader` to the new file `target`, durably. If `reader` cannot be read, or its bytes do not
    have this BLAKE3 digest, leave no file and return False.

    Raises OSError if `target` cannot be written. May raise what `interrupt` raises.
    """
    hasher, memory, at = blake3(), memoryview(bytearray(READ_BYTES)), 0
    try:
        # Bypass the page cache: the copy is not read again soon, and the coordinator needs the cache.
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
    """Return the number of bytes read: 0 at the end, and also if the disk fails; the digest then does not match. Raises
    StoreOutage, which says nothing about the bytes."""
    try:
        return reader.read_into(memory, at)
    except StoreOutage:
        raise
    except OSError:
        return 0
