"""The shards of a part of a token set, as they grow, and what is known of them when they do not any more."""

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
from blake3 import blake3
from pydantic import BaseModel, Field

from worker.data.making.tokenising import Text
from worker.data.tokens.index import Item, Shard
from worker.errors import DataError

_PIECE_BYTES = 1 << 20


class Grown(BaseModel):
    """How far a part is: its finished shards, and what the one that grows has so far."""

    shards: list[Shard] = Field(default_factory=list)
    tokens: int = 0
    documents: int = 0
    bytes: int = 0


class GrowingPart:
    """A part that grows from `grown` on, by shards of `shard_tokens`. Its files are PREFIX-00000.bin and so on."""

    def __init__(self, directory: Path, prefix: str, item: Item, shard_tokens: int, grown: Grown) -> None:
        self._directory, self._prefix, self._item, self._shard_tokens = directory, prefix, item, shard_tokens
        self.grown = grown
        self._hasher = blake3()
        self._file: BinaryIO | None = None
        if grown.tokens:
            self._resume()

    def add(self, text: Text) -> None:
        """Append the ids, and count the pieces of text where they begin."""
        at, ids = 0, text.ids.astype(self._item, copy=False)
        while at < len(ids):
            stop = min(len(ids), at + self._shard_tokens - self.grown.tokens)
            self._write(ids[at:stop].tobytes())
            first, last = np.searchsorted(text.starts, (at, stop))
            if stop == len(ids):
                last = len(text.starts)
            self.grown.tokens += stop - at
            self.grown.documents += int(text.begins[first:last].sum())
            self.grown.bytes += int(text.sizes[first:last].sum())
            if self.grown.tokens == self._shard_tokens:
                self.finish_shard()
            at = stop

    def sync(self) -> None:
        """Make what was appended durable."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish_shard(self) -> None:
        """End the shard that grows, if there is one."""
        if self._file is None:
            return
        self.sync()
        self._file.close()
        self._file, grown = None, self.grown
        shard = Shard(
            file=self._name,
            tokens=grown.tokens,
            digest=self._hasher.hexdigest(),
            documents=grown.documents,
            bytes=grown.bytes,
        )
        self.grown, self._hasher = Grown(shards=[*grown.shards, shard]), blake3()

    def close(self) -> None:
        """Close the file that grows, whatever is in it."""
        if self._file is not None:
            self._file.close()

    @property
    def _name(self) -> str:
        return f"{self._prefix}-{len(self.grown.shards):05}.bin"

    def _write(self, content: bytes) -> None:
        if self._file is None:
            self._file = (self._directory / self._name).open("wb")
        self._file.write(content)
        self._hasher.update(content)

    def _resume(self) -> None:
        """Cut the shard that grew to what is known to be in it, and hash that again."""
        path, left = self._directory / self._name, self.grown.tokens * self._item.itemsize
        try:
            self._file = path.open("r+b")
        except OSError as error:
            raise DataError(f"{path} is missing ({error.strerror}); {BEGIN_AGAIN}") from error
        while left and (piece := self._file.read(min(left, _PIECE_BYTES))):
            self._hasher.update(piece)
            left -= len(piece)
        if left:
            self._file.close()
            raise DataError(f"{path} is {left} bytes shorter than it was; {BEGIN_AGAIN}")
        self._file.truncate()


BEGIN_AGAIN = "delete the directory and begin again"
