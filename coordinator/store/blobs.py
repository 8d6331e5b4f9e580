"""Blobs: immutable bytes with descriptive names. Contributions, deltas, their residuals, and checkpoints are
blobs.

A blob exists only together with a row in the database; blobs without a row are deleted at start. Names are paths:

    runs/{run}/contributions/{round}/{p}.{worker}.{digest}   acknowledged contributions
    runs/{run}/deltas/{round}/{p}.{digest}                   published deltas
    runs/{run}/checkpoints/{round}/{p}.{digest}              checkpoints
    runs/{run}/residuals/{round}/{p}.{digest}                encoding errors of deltas (`aggregation/residual.py`)
    runs/{run}/set-aside/{n}/…                               blobs that a rollback or a restored database has undone
    runs/{run}/removed                                       marks a run that is being removed

`digest` is the first 16 hex digits of the BLAKE3 digest, so different bytes have different names.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, Self

from coordinator.store.data_directory import DataDirectory
from protocol.digest import Buffer
from protocol.errors import OuterstepError

if TYPE_CHECKING:
    from outerstep.common.objects import Objects

Kind = Literal["contributions", "deltas", "checkpoints", "residuals"]
REMOVED = "removed"
PROBE_S = 1.0
STORE_S = 3.0  # without an answer of the store, until it counts as out of reach
OWNER = "owner"  # the object in a bucket that names its owner
KINDS: tuple[Kind, ...] = ("contributions", "deltas", "checkpoints", "residuals")


class Reader(Protocol):
    """Bytes that are open for reading, at any offset and from several threads. A context manager."""

    @property
    def size(self) -> int:
        """Number of bytes."""

    def read_into(self, memory: memoryview, at: int) -> int:
        """Read bytes from offset `at` into `memory`. Return the number of bytes read; it is less than the length of
        `memory` only at the end. May raise OSError."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class FileReader:
    """An open local file, as a `Reader`."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)  # a file object, because it closes itself if no response is sent
        self.size = os.fstat(self._file.fileno()).st_size

    def read_into(self, memory: memoryview, at: int) -> int:
        return os.preadv(self._file.fileno(), [memory], at)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StoreOutage(OSError):
    """The store cannot be reached, or refuses; the message says why."""


class NotLeading(StoreOutage):
    """This coordinator's term is over, so it deletes nothing."""


@dataclass(frozen=True)
class SignedRequest:
    """A request to the store that its holder may send until it expires. The signature is in the URL, which is a secret
    until then."""

    method: str
    url: str = field(repr=False)
    headers: dict[str, str]


@dataclass(frozen=True)
class Uploaded:
    """What the store knows about an object. `sha256`: None if it reports none."""

    size: int
    sha256: bytes | None


class DirectAccess(Protocol):
    """What lets workers exchange blobs with the store, around the coordinator. Thread-safe."""

    def upload(self, name: str, sha256: bytes, expires_s: float) -> SignedRequest:
        """Return a request that creates the blob from the bytes with this SHA-256 digest, unless it exists."""

    def download_url(self, name: str, expires_s: float) -> str:
        """Return an address of the blob, valid for `expires_s` seconds at least."""

    def uploaded(self, name: str) -> Uploaded | None:
        """Return what the store knows about a blob; None if there is none. Raises StoreOutage."""

    def beginning(self, name: str, length: int) -> bytes:
        """Return the first `length` bytes of a blob, fewer if it has fewer. Raises FileNotFoundError, StoreOutage."""


@dataclass(frozen=True)
class OwnedBucket:
    """A bucket and the id of the coordinator that uses it. `leads` returns False once another coordinator of the same
    database may lead; None if there is no other one."""

    objects: "Objects"
    owner: str
    leads: Callable[[], bool] | None = None

    @classmethod
    def taken(cls, objects: "Objects", owner: str, leads: Callable[[], bool] | None = None) -> Self | None:
        """Make `owner` the bucket's owner. Return None if it has another one. May raise OuterstepError."""
        objects.create_from(OWNER, owner.encode())
        bucket = cls(objects, owner, leads)
        return bucket if bucket.is_owned() else None

    def is_owned(self) -> bool:
        """Return True if the bucket still has this owner. May raise OuterstepError."""
        found = self.objects.get(OWNER)
        return found is not None and found[0] == self.owner.encode()

    def check(self) -> None:
        """Raise StoreOutage unless the bucket still has this owner, and this coordinator leads. Called before objects
        are deleted."""
        with self.outages():
            owned = self.is_owned()
        if not owned:
            raise StoreOutage(
                f"the bucket {self.objects} belongs to another coordinator: it was restored elsewhere. Stop this one"
            )
        if self.leads is not None and not self.leads():
            raise NotLeading("this coordinator no longer leads, so it deletes nothing")

    @staticmethod
    @contextmanager
    def outages() -> Iterator[None]:
        """Raise errors of the store as `StoreOutage`, an OSError."""
        try:
            yield
        except OuterstepError as error:
            raise StoreOutage(str(error)) from error


class Blobs(Protocol):
    """A store of blobs. Thread-safe.

    Any method may raise OSError, because a store is a disk or a remote service. Local files that are passed in or
    created are in the data directory (`DataDirectory.scratch`), and may share their storage with the blob (a hard
    link). So never overwrite a file that has other names: unlink it first.
    """

    @property
    def direct(self) -> DirectAccess | None:
        """How workers transfer blobs without the coordinator; None if they cannot."""

    @property
    def bucket(self) -> OwnedBucket | None:
        """The bucket that has the blobs; None if they are elsewhere."""

    def put(self, name: str, source: Buffer | Path) -> bool:
        """Store bytes, or the content of a local file, as blob `name`. Return True if it is new; an existing blob is
        kept.

        The blob is durable when this returns, in either case. A local file stays where it is.
        """

    def open(self, name: str, *, fresh: bool = False) -> Reader:
        """Open a blob. Raises FileNotFoundError. `fresh`: read the store, even if there is a local copy of the blob."""

    def fetch(self, name: str, target: Path) -> None:
        """Copy a blob to the local file `target`, replacing an older one. Raises FileNotFoundError."""

    def rename(self, name: str, new_name: str) -> None:
        """Give a blob another name, over a blob of that name. After a crash it has at least one of the two. Raises
        FileNotFoundError."""

    def delete(self, *names: str) -> None:
        """Delete blobs, if they exist."""

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Yield the name and size of each blob under `prefix`, which ends with `/`, in no particular order."""

    def stat(self, name: str) -> int | None:
        """Return the size of a blob in bytes; None if it does not exist."""


OpenStore = Callable[[DataDirectory], Blobs]  # opens the blob store that belongs to a data directory


@dataclass(frozen=True)
class StoredBlob:
    """A blob as recorded in the database. `size`: in bytes; None if unknown."""

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

    def residual(self, round_: int, fragment: int, digest: bytes) -> str:
        return f"{self.kind('residuals')}{round_}/{fragment}.{digest.hex()[:16]}"

    def kind(self, kind: Kind) -> str:
        """Return the prefix of all blobs of a kind."""
        return f"runs/{self.run}/{kind}/"

    @property
    def all(self) -> str:
        """The prefix of all blobs of the run."""
        return f"runs/{self.run}/"

    @property
    def removed(self) -> str:
        """The blob that marks a run that is being removed."""
        return f"{self.all}{REMOVED}"

    @property
    def set_aside(self) -> str:
        """The prefix of blobs that were set aside."""
        return f"runs/{self.run}/set-aside/"


def round_of(name: str) -> int:
    """Return the round of a contribution, a delta, a checkpoint or a residual."""
    return int(name.split("/")[3])


class StoreProbe:
    """Whether this process can reach the store of its blobs. A store that hangs raises no error for minutes, so what
    counts is how long a question has had no answer. `ask` reads something from the store, and may take long to fail.
    `clock`: monotonic."""

    def __init__(self, ask: Callable[[], object], clock: Callable[[], float]) -> None:
        self._ask, self._clock = ask, clock
        self.asked_at: float | None = None  # the first question since the last answer
        self._error = ""
        self.answer_s: float | None = None  # the time of the last answer; None if the last attempt failed

    @property
    def silent_s(self) -> float:
        """Seconds since the first question that has no answer; 0 if the last one was answered."""
        return 0.0 if (asked_at := self.asked_at) is None else self._clock() - asked_at

    @property
    def fault(self) -> str:
        """Why the store cannot be used; empty if it can."""
        return self.why if self.silent_s > STORE_S else ""

    @property
    def why(self) -> str:
        """Why that question has no answer."""
        return self._error or f"no answer for {self.silent_s:.0f} s"

    def run(self) -> None:
        """Ask once."""
        began = self._clock()
        if self.asked_at is None:
            self.asked_at = began
        try:
            self._ask()
            self.asked_at, self._error = None, ""
            self.answer_s = self._clock() - began
        except Exception as error:  # noqa: BLE001 - whatever it is, the store cannot be used
            self._error, self.answer_s = str(error), None

    def start(self, stopping: threading.Event) -> None:
        """Ask every PROBE_S until `stopping` is set, on a thread that may hang in a request: nobody waits for it."""

        def ask_again() -> None:
            while not stopping.wait(PROBE_S):
                self.run()

        threading.Thread(target=ask_again, name="store probe", daemon=True).start()
