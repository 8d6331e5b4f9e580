"""A second store of blobs, in memory: what runs over it does not depend on files."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from protocol.digest import Buffer


class BytesReader:
    """Bytes that are open to be read, as a `coordinator.store.blobs.Reader`."""

    def __init__(self, content: bytes) -> None:
        self._content: bytes | None = content
        self.size = len(content)

    def read_into(self, memory: memoryview, at: int) -> int:
        if self._content is None:
            raise ValueError("this reader is closed")
        piece = self._content[at : at + len(memory)]
        memory[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._content = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MemoryBlobs:
    """Blobs in a dict. They last as long as this object, so a coordinator that starts again is given it again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contents: dict[str, bytes] = {}

    def put(self, name: str, source: Buffer | Path) -> bool:
        content = source.read_bytes() if isinstance(source, Path) else bytes(memoryview(source).cast("B"))
        with self._lock:
            return self._contents.setdefault(name, content) is content

    def open(self, name: str) -> BytesReader:
        return BytesReader(self._content(name))

    def fetch(self, name: str, target: Path) -> None:
        content = self._content(name)
        target.unlink(missing_ok=True)
        target.write_bytes(content)

    def delete(self, name: str) -> None:
        with self._lock:
            self._contents.pop(name, None)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        with self._lock:
            found = [(name, len(content)) for name, content in self._contents.items() if name.startswith(prefix)]
        yield from found

    def stat(self, name: str) -> int | None:
        content = self._contents.get(name)
        return None if content is None else len(content)

    def _content(self, name: str) -> bytes:
        try:
            return self._contents[name]
        except KeyError:
            raise FileNotFoundError(name) from None
