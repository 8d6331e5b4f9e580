"""The interface of a backup store, and what every kind of store needs: a directory (`directory.py`) or a bucket
(`bucket.py`)."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from coordinator.backup.manifest import Content, Manifest, decode
from coordinator.store.blobs import FileReader, Reader
from coordinator.store.payloads import READ_BYTES, digest_of
from outerstep.common.files import Writer
from protocol.errors import OuterstepError


class Damaged(OuterstepError):
    """A backup is incomplete or corrupt; the message says how."""


class Interrupted(Exception):
    """The coordinator is stopping. What was copied stays, and the next backup continues from there."""


def never_interrupt() -> None:
    """The `interrupt` of a backup that nothing interrupts."""


class BackupStore(Protocol):
    """A store of backups. Reading needs no lock; writing happens within `locked`. `str(store)` names it in messages.

    Blobs are stored under their BLAKE3 digest, so each is stored once however many backups contain it. On a remote
    store any method may raise Transient, and OuterstepError for errors that a retry does not fix.
    """

    @property
    def disk(self) -> Path:
        """The local directory that the store writes to. Its disk may be full."""

    # --- reading --------------------------------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """Return the numbers of the backups, newest first."""

    def manifest(self, number: int) -> Manifest:
        """Return the manifest of a backup. Raises Damaged, also if the backup was removed in the meantime."""

    def database_name(self, manifest: Manifest) -> str:
        """Return the path or address of the backup's copy of the database, for messages."""

    def blob_name(self, digest: str) -> str:
        """Return the path or address that the blob has if it is stored, for messages."""

    def open_database(self, manifest: Manifest) -> Reader:
        """Open the backup's copy of the database. Raises OSError."""

    def open_blob(self, digest: str) -> Reader:
        """Open a blob. Raises OSError."""

    # --- writing --------------------------------------------------------------------------------------------------

    def locked(self) -> AbstractContextManager[None]:
        """Lock the store against other backups, and create it if it is missing.

        Raises OuterstepError if another backup is being made there, or if it contains something else.
        """

    def scratch(self) -> Path:
        """Return an unused local path, for a database that is being copied."""

    def holds(self, blob: Content) -> bool:
        """Return True if a blob of this digest and size is stored."""

    def take_blob(self, reader: Reader, digest: str, interrupt: Callable[[], object]) -> bool:
        """Store a blob. Return False, and store nothing, if what `reader` reads does not have this digest or cannot be
        read.

        The blob is durable once `add` has returned. `interrupt` is called now and then, and may raise.
        """

    def add(self, manifest: Manifest, database: Path, interrupt: Callable[[], object]) -> None:
        """Add a backup that consists of stored blobs and the file `database`. The manifest is written last, so a backup
        that has one is complete. Durable when this returns. `interrupt` is called now and then, and may raise."""

    def remove(self, number: int) -> None:
        """Remove a backup but not its blobs: the manifest first."""

    def remove_databases_but(self, kept: list[Manifest], unreadable: set[int]) -> None:
        """Remove the database copies of backups that were removed or never finished: all but those of `kept`, and of
        the backups numbered `unreadable`, whose manifest cannot be read."""

    def digests(self) -> list[str]:
        """Return the digests of all stored blobs."""

    def remove_blobs(self, digests: list[str]) -> None:
        """Remove blobs."""


def manifest_of(content: bytes, number: int) -> Manifest:
    """Decode the manifest of backup `number`. Raises Damaged."""
    try:
        manifest = decode(content)
    except ValueError as error:
        raise Damaged(str(error)) from error
    if manifest.number != number:
        raise Damaged(f"its manifest is that of backup {manifest.number}")
    return manifest


def is_whole(opened: Callable[[], Reader], content: Content) -> bool:
    """Return True if what `opened` opens can be read and has this content."""
    try:
        with opened() as reader:
            return reader.size == content.size and digest_of(reader).hex() == content.digest
    except OSError:
        return False


def content_of(path: Path) -> Content:
    """Return the digest and size of a file."""
    with FileReader(path) as reader:
        return Content(digest=digest_of(reader).hex(), size=reader.size)


def copy_whole(reader: Reader, target: Path, digest: str, interrupt: Callable[[], object] = never_interrupt) -> bool:
    """Copy what `reader` reads to the new file `target`, durably. Return False, and leave no file, if it does not have
    this BLAKE3 digest or cannot be read.

    Raises OSError if `target` cannot be written, and what `interrupt` raises.
    """
    hasher, memory, at = blake3(), memoryview(bytearray(READ_BYTES)), 0
    try:
        # Past the page cache, which the coordinator needs: the copy is not read again soon.
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
    """Return the number of bytes read: 0 at the end, and where the disk fails, which the digest then shows."""
    try:
        return reader.read_into(memory, at)
    except OSError:
        return 0
