"""Blobs: immutable bytes under names that say what they are. Contributions, deltas and checkpoints are blobs.

A blob exists only together with a row in the database; what has no row is swept at start. Names are paths with `/`:

    runs/{run}/contributions/{round}/{p}.{worker}.{digest}   acknowledged contributions
    runs/{run}/deltas/{round}/{p}.{digest}                   published deltas
    runs/{run}/checkpoints/{round}/{p}.{digest}              checkpoints
    runs/{run}/set-aside/{n}/…                               blobs newer than a database restored from a backup
    runs/{run}/removed                                       the mark of a run that is being removed

`digest` is the beginning of the bytes' BLAKE3 digest, so other bytes have another name.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self

from coordinator.store.data_directory import DataDirectory
from protocol.digest import Buffer

Kind = Literal["contributions", "deltas", "checkpoints"]
REMOVED = "removed"
KINDS: tuple[Kind, ...] = ("contributions", "deltas", "checkpoints")


class Reader(Protocol):
    """Bytes that are open to be read, at any place and by several threads. A context manager."""

    @property
    def size(self) -> int:
        """How many bytes there are."""

    def read_into(self, memory: memoryview, at: int) -> int:
        """Read bytes from `at` on into `memory`; return how many, fewer than it holds only at the end. May raise
        OSError."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class FileReader:
    """An open local file, as a `Reader`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)  # a file object closes itself if the response is never sent
        self.size = os.fstat(self._file.fileno()).st_size

    def read_into(self, memory: memoryview, at: int) -> int:
        return os.preadv(self._file.fileno(), [memory], at)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Blobs(Protocol):
    """A store of blobs. Thread-safe.

    Any method may raise OSError: a store is at the other end of a disk or of a line. Local files that it is given or
    makes lie in the data directory (`DataDirectory.scratch`), and may share their storage with the blob: whoever wants
    to overwrite one that has other names makes a new file instead.
    """

    def put(self, name: str, source: Buffer | Path) -> bool:
        """Store the bytes, or those of the local file, under `name` unless that exists; return True if it did not.

        The blob is durable when this returns, whoever has stored it. A local file stays where it is.
        """

    def open(self, name: str) -> Reader:
        """Open a blob. That it is deleted meanwhile does no harm. Raises FileNotFoundError."""

    def fetch(self, name: str, target: Path) -> None:
        """Make the local file `target` from a blob, in the place of an older one. Raises FileNotFoundError."""

    def delete(self, name: str) -> None:
        """Delete a blob, if there is one of this name."""

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield name and bytes of each blob under `prefix`, a name that ends with `/`, in no order."""

    def stat(self, name: str) -> int | None:
        """Return the bytes of a blob; None if there is none of this name."""


Store = Callable[[DataDirectory], Blobs]  # opens the store of a coordinator with this data directory


@dataclass(frozen=True)
class Stored:
    """A blob as the database has it: name, BLAKE3 digest, and bytes where they are known."""

    name: str
    digest: bytes
    size: int | None


@dataclass(frozen=True)
class RunNames:
    """The names of one run's blobs."""

    run: str

    def contribution(self, round_: int, fragment: int, worker: str, digest: bytes) -> str:
        return f"{self.kind('contributions')}{round_}/{fragment}.{worker}.{digest.hex()[:16]}"

    def delta(self, round_: int, fragment: int, digest: bytes) -> str:
        return f"{self.kind('deltas')}{round_}/{fragment}.{digest.hex()[:16]}"

    def checkpoint(self, round_: int, fragment: int, digest: bytes) -> str:
        return f"{self.kind('checkpoints')}{round_}/{fragment}.{digest.hex()[:16]}"

    def kind(self, kind: Kind) -> str:
        """Return the prefix of all blobs of a kind."""
        return f"runs/{self.run}/{kind}/"

    @property
    def all(self) -> str:
        """The prefix of all of them."""
        return f"runs/{self.run}/"

    @property
    def removed(self) -> str:
        """The mark of a run that is being removed."""
        return f"{self.all}{REMOVED}"

    @property
    def set_aside(self) -> str:
        """The prefix of what was set aside."""
        return f"runs/{self.run}/set-aside/"


def round_of(name: str) -> int:
    """Return the round of a contribution, a delta or a checkpoint."""
    return int(name.split("/")[3])


def move(blobs: Blobs, name: str, new_name: str, scratch: Path) -> None:
    """Give a blob another name, durably: after a crash it has at least one of the two. `scratch`: an unused path."""
    try:
        blobs.fetch(name, scratch)
        blobs.put(new_name, scratch)
    finally:
        scratch.unlink(missing_ok=True)
    blobs.delete(name)
