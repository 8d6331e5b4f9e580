"""What a place of backups offers: a directory (directory.py), or a prefix of a bucket (bucket.py)."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from coordinator.backup.manifest import Content, Manifest, decode
from coordinator.store.blobs import FileReader, Reader
from coordinator.store.payloads import digest_of
from protocol.errors import OuterstepError


class Damaged(OuterstepError):
    """A backup that is not whole: what is wrong with it."""


class Place(Protocol):
    """Backups, to be read; within `locked`, to be written as well. `str` of it is its name in sentences.

    Blobs are there by their BLAKE3 digest: each once, however many backups need it. Where the place is at the other end
    of a line, any method raises Transient, and OuterstepError for what another try does not mend.
    """

    @property
    def disk(self) -> Path:
        """The local directory that it writes to, which may be full."""

    # --- reading --------------------------------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """Return the numbers of the backups, newest first."""

    def manifest(self, number: int) -> Manifest:
        """Return the manifest of a backup. Raises Damaged, also for one that was removed meanwhile."""

    def database_name(self, manifest: Manifest) -> str:
        """Return where the copy of a backup's database is, as people are told."""

    def blob_name(self, digest: str) -> str:
        """Return where the blob is, if it is there, as people are told."""

    def open_database(self, manifest: Manifest) -> Reader:
        """Open the copy of a backup's database. Raises OSError."""

    def open_blob(self, digest: str) -> Reader:
        """Open a blob. Raises OSError."""

    # --- writing --------------------------------------------------------------------------------------------------

    def locked(self) -> AbstractContextManager[None]:
        """Let nobody else write there meanwhile; the place is made where it is missing.

        Raises OuterstepError if another backup is being made there, or if it is a place of something else.
        """

    def scratch(self) -> Path:
        """Return an unused path of a local file, for a database that is being copied."""

    def holds(self, blob: Content) -> bool:
        """Return True if the blob is there, by its name and size."""

    def take_blob(self, reader: Reader, digest: str, interrupt: Callable[[], object]) -> bool:
        """Copy what `reader` reads; return False, and leave none, where it has not this digest or cannot be read.
        The blob is durable once `add` has returned. Raises what `interrupt` raises, which is called now and then."""

    def add(self, manifest: Manifest, database: Path, interrupt: Callable[[], object]) -> None:
        """Make a new backup of the blobs that are there and the file `database`: the manifest last, so that one that is
        there names what is. Durable when this returns. Raises what `interrupt` raises."""

    def remove(self, number: int) -> None:
        """Remove a backup, but for the blobs: first what makes it one."""

    def remove_databases_but(self, kept: list[Manifest], unread: set[int]) -> None:
        """Remove the copies of databases of backups that were removed or not finished: they are neither in `kept`, nor
        have they the number of one in `unread`, of which the manifest cannot be read."""

    def digests(self) -> list[str]:
        """Return the digests of all blobs that are there."""

    def remove_blobs(self, digests: list[str]) -> None:
        """Remove blobs."""


def manifest_of(content: bytes, number: int) -> Manifest:
    """Return the manifest of a backup from its bytes. Raises Damaged."""
    try:
        manifest = decode(content)
    except ValueError as error:
        raise Damaged(str(error)) from error
    if manifest.number != number:
        raise Damaged(f"its manifest is that of backup {manifest.number}")
    return manifest


def is_whole(opened: Callable[[], Reader], content: Content) -> bool:
    """Return True if it can be opened and read, and has this content."""
    try:
        with opened() as reader:
            return reader.size == content.size and digest_of(reader).hex() == content.digest
    except OSError:
        return False


def content_of(path: Path) -> Content:
    """Return what the file holds."""
    with FileReader(path) as reader:
        return Content(digest=digest_of(reader).hex(), size=reader.size)
