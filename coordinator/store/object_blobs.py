"""Blobs as objects of a bucket, below a prefix.

Objects are created on condition that none has the name, which the store decides. Blobs that are read, and files that
are put, are kept as local copies, up to CACHE_BYTES: the average reads every contribution twice, and workers without
direct transfers read every delta. A copy is never better than the object: `open(name, fresh=True)` reads the store.
"""

import itertools
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from coordinator.store.blobs import DirectAccess, FileReader, OwnedBucket, Reader
from coordinator.store.data_directory import CACHE_BYTES, COPIES, DataDirectory
from outerstep.common.objects import ObjectReader
from protocol.digest import Buffer

outages = OwnedBucket.outages

COPIED_BYTES = 5 << 30  # the largest object that S3 copies in one request
LARGEST_SHARE = 4  # of the cache, one blob takes at most a fourth
TURNS = 64  # locks; now and then two blobs have the same one, and one of them waits


class ObjectBlobs:
    """Blobs whose names are paths below a prefix of a bucket. The methods are documented in `Blobs`."""

    def __init__(
        self,
        bucket: OwnedBucket,
        data: DataDirectory,
        cache_bytes: int = CACHE_BYTES,
        direct: DirectAccess | None = None,
        copies: str = COPIES,
    ) -> None:
        """`copies`: the folder of the local copies, in the data directory."""
        self.bucket, self._objects, self._data, self.direct = bucket, bucket.objects, data, direct
        self._copies = _LocalCopies(data.root / copies, cache_bytes)

    def put(self, name: str, source: Buffer | Path) -> bool:
        with outages():
            created = self._objects.create_from(name, source)
        if created and isinstance(source, Path):
            self._keep(name, source)
        return created

    def open(self, name: str, *, fresh: bool = False) -> Reader:
        if fresh:
            self._copies.drop(name)
            return _Streamed(self._objects, name, self._size(name))
        with self._copies.turn(name):
            if (copy := self._copies.open(name)) is not None:
                return copy
            size = self._size(name)
            if not self._fits(size):
                return _Streamed(self._objects, name, size)
            file = self._data.scratch()
            try:
                self._download(name, file)
                self._copies.add(name, file, size)
                return FileReader(file)
            finally:
                file.unlink(missing_ok=True)

    def fetch(self, name: str, target: Path) -> None:
        file = self._data.scratch()
        try:
            self._download(name, file)
            file.replace(target)
        finally:
            file.unlink(missing_ok=True)

    def rename(self, name: str, new_name: str) -> None:
        if self._size(name) <= COPIED_BYTES:
            with outages():
                self._objects.copy(name, new_name)
        else:
            file = self._data.scratch()
            try:
                self._download(name, file)
                self.put(new_name, file)
            finally:
                file.unlink(missing_ok=True)
        self.delete(name)

    def delete(self, *names: str) -> None:
        if not names:
            return
        self.bucket.check()
        for name in names:
            self._copies.drop(name)
        with outages():
            self._objects.delete(names)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        with outages():
            for name, size in self._objects.within(prefix.rstrip("/")):
                yield f"{prefix}{name}", size

    @outages()
    def stat(self, name: str) -> int | None:
        return self._objects.size(name)

    def _size(self, name: str) -> int:
        if (size := self.stat(name)) is None:
            raise FileNotFoundError(self._objects.name(name))
        return size

    def _download(self, name: str, file: Path) -> None:
        with outages(), file.open("xb") as out:
            self._objects.download(name, out.write)

    def _keep(self, name: str, source: Path) -> None:
        size = source.stat().st_size
        if self._fits(size):
            self._copies.add(name, source, size)

    def _fits(self, size: int) -> bool:
        """Return True if a blob of this size may be kept locally."""
        if size * LARGEST_SHARE > self._copies.limit_bytes:
            return False
        try:
            self._data.check_space(size)
        except OSError:
            return False
        return True


class _Streamed(ObjectReader):
    """An object that is read from the store."""

    @outages()
    def read_into(self, memory: memoryview, at: int) -> int:
        return super().read_into(memory, at)


class _LocalCopies:
    """Files in `folder` with the content of blobs, at most `limit_bytes` together. Those that were not used for longest
    go first. None are kept from an earlier process. Thread-safe."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self.limit_bytes = folder, limit_bytes
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._files: OrderedDict[str, tuple[Path, int]] = OrderedDict()  # by blob: the file and its size
        self._bytes = 0
        self._turns = [threading.Lock() for _ in range(TURNS)]

    def turn(self, name: str) -> threading.Lock:
        """Of several threads that ask for one blob, let one go on at a time: so only the first downloads it."""
        return self._turns[hash(name) % TURNS]

    def open(self, name: str) -> FileReader | None:
        with self._lock:
            if name not in self._files:
                return None
            self._files.move_to_end(name)
            return FileReader(self._files[name][0])

    def add(self, name: str, file: Path, size: int) -> None:
        """Keep the content of `file`, as another name of it."""
        copy = self._folder / str(next(self._numbers))
        os.link(file, copy)
        with self._lock:
            self._drop(name)
            self._files[name] = copy, size
            self._bytes += size
            while self._bytes > self.limit_bytes:
                self._drop(next(iter(self._files)))

    def drop(self, name: str) -> None:
        with self._lock:
            self._drop(name)

    def _drop(self, name: str) -> None:
        file, size = self._files.pop(name, (None, 0))
        if file is not None:
            file.unlink(missing_ok=True)
            self._bytes -= size
