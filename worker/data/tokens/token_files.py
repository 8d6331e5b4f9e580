"""Read tokens from shards that are files, with positioned reads. The files are not mapped into memory.

numpy's memory maps would need fewer lines, but if a mapped file is truncated, or its disk or network file system fails,
SIGBUS kills the process without a message; a read reports the error. Also, the pages of a map count as the process's
memory until the system needs them for something else, which hides how much memory the process really uses.

A shard is hashed at its first use. That one pass also loads it into the page cache before its sequences are read in
random order.
"""

import os
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO

import numpy as np
from blake3 import blake3

from worker.data.order import WINDOW_SHARDS, Integers
from worker.data.tokens.index import AGAIN, Index, Shard
from worker.data.tokens.marks import IDS
from worker.data.tokens.tokenizer import Tokens
from worker.errors import DataError

OPEN_FILES = 2 * WINDOW_SHARDS  # a unit may span two windows
_CHUNK_BYTES = 1 << 20


class TokenFiles:
    """The training or held-out shards of a set. `open_shard` returns the open, verified file of shard i, which it may
    fetch first."""

    def __init__(self, index: Index, shards: Sequence[Shard], open_shard: Callable[[int], IO[bytes]]) -> None:
        self.tokens = [shard.tokens for shard in shards]
        self._shards = shards
        self._item, self._vocabulary = index.item, index.vocabulary
        self._marked = index.conversations is not None
        self._opening = threading.Lock()  # so that concurrent threads open a shard only once
        # A file that drops out of the cache is closed when its last user releases it.
        self._file = lru_cache(OPEN_FILES)(open_shard)

    def read(self, shards: Integers, starts: Integers, length: int) -> Tokens:
        """Return tokens; see `Shards.read` in worker/data/training_set.py."""
        out = np.empty((len(shards), length), self._item)
        offsets = starts * self._item.itemsize
        for row, shard, offset in zip(out, shards.tolist(), offsets.tolist(), strict=True):
            file = self._open_file(shard)
            begin = self._shards[shard].offset + offset
            try:
                count = os.preadv(file.fileno(), [row.data], begin)
            except OSError as error:
                raise DataError(f"{file.name} cannot be read at {begin}: {error}; {AGAIN}") from error
            if count != row.nbytes:
                raise DataError(
                    f"{file.name} was cut short: {count} of {row.nbytes} bytes could be read at {begin}; {AGAIN}"
                )
        if len(out) and int((ids := self._ids(out)).max()) >= self._vocabulary:
            self._raise_id_too_large(ids, shards, starts)
        return out

    def verify(self) -> None:
        """Open every shard. Raises DataError."""
        for shard in range(len(self._shards)):
            self._open_file(shard)

    def _open_file(self, shard: int) -> IO[bytes]:
        with self._opening:
            return self._file(shard)

    def _ids(self, out: Tokens) -> Tokens:
        """Return the ids without marks."""
        return out & np.uint32(IDS) if self._marked else out

    def _raise_id_too_large(self, out: Tokens, shards: Integers, starts: Integers) -> None:
        row, column = np.unravel_index(int(out.argmax()), out.shape)
        file = self._open_file(int(shards[row]))
        raise DataError(
            f"{file.name} has the token id {out[row, column]} at token {starts[row] + column}, but the "
            f"vocabulary of the set is {self._vocabulary}: its index is wrong; prepare the set again"
        )


def in_directory(index: Index, shards: Sequence[Shard], directory: Path) -> TokenFiles:
    """Return these shards of a set whose files are in `directory`. Each is verified at its first use."""
    verified: set[int] = set()

    def open_shard(number: int) -> IO[bytes]:
        shard = shards[number]
        path = directory / shard.file
        try:
            file = path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}; {AGAIN}") from error
        if number not in verified:
            _verify(shard, file, path, index.item.itemsize)
            verified.add(number)
        return file

    return TokenFiles(index, shards, open_shard)


def _verify(shard: Shard, file: IO[bytes], path: Path, itemsize: int) -> None:
    """Raise DataError unless the shard in this open file matches its digest."""
    file.seek(shard.offset)
    size = shard.tokens * itemsize
    try:
        digest, read = digest_of(file, size)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if read < size:
        raise DataError(f"{path} was cut short: {size - read} bytes of the shard are missing; {AGAIN}")
    if digest != shard.digest:
        raise DataError(
            f"{path} was altered: the digest of its {shard.tokens} tokens is {digest} instead of {shard.digest}, as in "
            f"the index; {AGAIN}"
        )


def digest_of(file: IO[bytes], size: int) -> tuple[str, int]:
    """Return the BLAKE3 of the next `size` bytes of a raw file, and how many of them it has."""
    hasher, left = blake3(), size
    chunk = memoryview(bytearray(min(_CHUNK_BYTES, left)))
    while left and (count := file.readinto(chunk[:left])):  # type: ignore[attr-defined]
        hasher.update(chunk[:count])
        left -= count
    return hasher.hexdigest(), size - left
