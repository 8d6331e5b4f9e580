"""The store of blobs that a coordinator in a thread uses: its data directory, or with `pytest --blobs=memory` memory;
and how tests look into a store and spoil what is in it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.run.live_run import LiveRun
from coordinator.store.blobs import Blobs, Kind, Reader, round_of
from coordinator.store.data_directory import DataDirectory
from coordinator.store.directory_blobs import DirectoryBlobs
from harness.memory_blobs import MemoryBlobs
from protocol.digest import Buffer

in_memory = False  # set by `--blobs=memory`
_by_directory: dict[Path, MemoryBlobs] = {}  # so that a coordinator that starts again on its directory finds them


def store(data: DataDirectory) -> Blobs:
    """Return the store of a coordinator with this data directory."""
    return _by_directory.setdefault(data.root, MemoryBlobs()) if in_memory else DirectoryBlobs(data)


def read(blobs: Blobs, name: str) -> bytes:
    with blobs.open(name) as reader:
        content = bytearray(reader.size)
        assert reader.read_into(memoryview(content), 0) == len(content)
    return bytes(content)


def replace(blobs: Blobs, name: str, content: bytes) -> None:
    """Let the name have other bytes, as only a broken disk does."""
    blobs.delete(name)
    blobs.put(name, content)


def spoil(blobs: Blobs, name: str) -> None:
    """Flip one bit in the middle of a blob."""
    content = bytearray(read(blobs, name))
    content[len(content) // 2] ^= 1
    replace(blobs, name, bytes(content))


def names(run: LiveRun, kind: Kind, round_: int | None = None, fragment: int | None = None) -> list[str]:
    """Return the names of a run's blobs of a kind, of one round or fragment if that is given."""
    found = sorted(name for name, _ in run.blobs.list(run.names.kind(kind)))
    found = [name for name in found if round_ is None or round_of(name) == round_]
    return [name for name in found if fragment is None or name.split("/")[4].split(".")[0] == str(fragment)]


def the(run: LiveRun, kind: Kind, round_: int, fragment: int) -> str:
    """Return the name of the only blob of a kind, round and fragment."""
    (name,) = names(run, kind, round_, fragment)
    return name


def rounds(run: LiveRun, kind: Kind) -> list[int]:
    """Return the rounds that have blobs of a kind."""
    return sorted({round_of(name) for name in names(run, kind)})


def nothing(name: str) -> None:
    """What happens before or after a put where nothing is said."""


@contextmanager
def disturbed(
    run: LiveRun, kind: Kind, before: Callable[[str], object] = nothing, after: Callable[[str], object] = nothing
) -> Iterator[None]:
    """Within, `before` is called with the name before each put of the run's blobs of a kind, and `after` after it."""
    real = run.blobs
    run.blobs = Disturbed(real, run.names.kind(kind), before, after)
    try:
        yield
    finally:
        run.blobs = real


class Disturbed:
    """Blobs, but that `before` is called before a put of one under `prefix`, and `after` after it."""

    def __init__(
        self, blobs: Blobs, prefix: str, before: Callable[[str], object], after: Callable[[str], object]
    ) -> None:
        self._blobs, self._prefix, self._before, self._after = blobs, prefix, before, after

    def put(self, name: str, source: Buffer | Path) -> bool:
        if not name.startswith(self._prefix):
            return self._blobs.put(name, source)
        self._before(name)
        created = self._blobs.put(name, source)
        self._after(name)
        return created

    def open(self, name: str) -> Reader:
        return self._blobs.open(name)

    def fetch(self, name: str, target: Path) -> None:
        self._blobs.fetch(name, target)

    def delete(self, name: str) -> None:
        self._blobs.delete(name)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        return self._blobs.list(prefix)

    def stat(self, name: str) -> int | None:
        return self._blobs.stat(name)


class Blocked:
    """Puts of a kind of a run's blobs fail, until they are `unblocked`."""

    def __init__(self, run: LiveRun, kind: Kind) -> None:
        self._blocked = True
        run.blobs = Disturbed(run.blobs, run.names.kind(kind), self._refuse, nothing)

    def unblock(self) -> None:
        self._blocked = False

    def _refuse(self, name: str) -> None:
        if self._blocked:
            raise NotADirectoryError(name)
