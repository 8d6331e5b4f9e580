"""The interface of a backup store, and the functions that both kinds of store need: a directory (`directory.py`) and a
bucket (`bucket.py`)."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

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


class BackupStore(Protocol):
    """A store of backups. Reading needs no lock; writing happens within `locked`. `str(store)` names it in messages.

    Blobs are stored under their BLAKE3 digest, so each is stored once however many backups contain it. On a remote
    store any method may raise Transient, or OuterstepError for errors that a retry does not fix.
    """

    @property
    def disk(self) -> Path:
        """The local directory that the store writes to. Its disk may be full."""

    # --- reading --------------------------------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """Return the numbers of the backups, newest first."""

    def manifest(self, number: int) -> Manifest:
        """Return the manifest of a backup. Raises DamagedBackup, also if the backup was removed in the meantime."""

    def database_name(self, manifest: Manifest) -> str:
        """Return the path or address of the backup's copy of the database, for messages."""

    def blob_name(self, digest: str) -> str:
        """Return the path or address of the blob, whether it is stored or not, for messages."""

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
        """Store a blob. If `reader` cannot be read, or its bytes do not have this digest, store nothing and return
        False.

        The blob is durable once `add` has returned. `interrupt` is called now and then, and may raise.
        """

    def add(self, manifest: Manifest, database: Path, interrupt: Callable[[], object]) -> None:
        """Add a backup that consists of stored blobs and the file `database`. The manifest is written last, so a backup
        that has one is complete. Durable when this returns. `interrupt` is called now and then, and may raise."""

    def remove(self, number: int) -> None:
        """Remove a backup, the manifest first. Its blobs are kept."""

    def remove_databases_but(self, kept: list[Manifest], unreadable: set[int]) -> None:
        """Remove the database copies of backups that were removed or never finished. The copies of `kept` stay, and
        those of the backups numbered `unreadable`, which have an unreadable manifest."""

    def digests(self) -> list[str]:
        """Return the digests of all stored blobs."""

    def remove_blobs(self, digests: list[str]) -> None:
        """Remove blobs."""


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
    """Return True if the reader that `opened` returns can be read and has this content."""
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
