"""The content of files in parts, decompressed if the name ends with .gz (RFC 1952) or .zst (RFC 8878).

One process reads the files and cuts them into parts; the others tokenise these. Compressed files can only be read from
their start, and this way all files are cut by the same rule. No file is ever in memory as a whole.
"""

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from worker.data.sources.documents import character_start
from worker.data.sources.files import changed
from worker.errors import DataError

_STEP_BYTES = 1 << 12  # decompressed at once; malicious ones expand to a hundred megabytes
_OUT_BYTES = 1 << 20
_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(wbits=31),  # with gzip's header and checksum
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
}


@dataclass(frozen=True)
class Part:
    """A part of a file's content, which begins at byte `at` of it and `ends` it or not. `size` bytes of the file were
    read for it."""

    path: Path
    at: int
    content: bytes
    size: int
    ends: bool


def is_compressed(path: Path) -> bool:
    """Return True if the file's content is decompressed."""
    return path.suffix.lower() in _DECOMPRESSORS


def parts(path: Path, wanted: Iterator[int], most: int | None = None) -> Iterator[Part]:
    """Yield the content of a file, cut where lines begin: at the first one from each of the bytes `wanted`, ascending
    and without end. If none begins within about `most` bytes of it, the cut is where a character begins.

    Yields at least one part. Raises DataError.
    """
    content, at, size, target = bytearray(), 0, 0, next(wanted)
    for piece, packed, ended in _pieces(path):
        content += piece
        size += packed
        while 0 < (end := _next_line(content, target - at, most, ended)) < len(content):
            yield Part(path, at, bytes(content[:end]), size, ends=False)
            del content[:end]
            at, size = at + end, 0
            target = next(each for each in wanted if each > at)
    yield Part(path, at, bytes(content), size, ends=True)


def _next_line(content: bytearray, at: int, most: int | None, ended: bool) -> int:
    """Return the first byte, `at` > 0 or later, where a line begins. If there is none in 2 * `most` bytes, or in those
    that follow `at` if the stream has `ended` and they are at least `most`: where a character begins. Otherwise 0."""
    stop = len(content) if most is None else at - 1 + 2 * most
    found = content.find(b"\n", at - 1, stop) + 1
    if not found and most is not None and len(content) >= (at + most if ended else stop):
        return at + character_start(bytes(content[at : at + 4]), 0, 1)
    return found


def length_of(path: Path) -> int:
    """Return how many bytes of content a file has. A compressed one is read for it. Raises DataError."""
    return sum(len(piece) for piece, *_ in _pieces(path)) if is_compressed(path) else path.stat().st_size


def beginning(path: Path, size: int) -> bytes:
    """Return the first `size` bytes of the content, or all if there are fewer. Raises DataError."""
    content = b""
    for piece, *_ in _pieces(path, size):
        content += piece
        if len(content) >= size:
            break
    return content[:size]


def _pieces(path: Path, out_bytes: int = _OUT_BYTES) -> Iterator[tuple[bytes, int, bool]]:
    """Yield the content of a file in pieces of at least `out_bytes`: (content, bytes of the file read for it, whether
    it is the last). Raises DataError."""
    new_member = _DECOMPRESSORS.get(path.suffix.lower())
    member: Any = None  # the current one; a compressed file may consist of several, end to end
    out, size, read = bytearray(), 0, 0
    try:
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            while packed := file.read(_STEP_BYTES if new_member else out_bytes):
                size, read = size + len(packed), read + len(packed)
                if new_member is None:
                    out += packed
                while new_member and packed:
                    member = member or new_member()
                    out += member.decompress(packed)
                    packed = member.unused_data
                    if member.eof:
                        member = None
                if len(out) >= out_bytes:
                    yield bytes(out), size, False
                    out, size = bytearray(), 0
    except (zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path} is damaged ({error}); fetch it again, and prepare the set anew") from error
    if read != length:
        raise changed(path)
    if member is not None:
        raise DataError(
            f"{path} was cut short: its compressed data is incomplete; fetch it again, and prepare the set anew"
        )
    yield bytes(out), size, True
