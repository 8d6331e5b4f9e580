"""Compressed files of JSON lines or text: gzip (RFC 1952) or zstd (RFC 8878), which can only be read from their start.

One process decompresses them and cuts the result where an uncompressed file would be cut; the others tokenise these
parts. So the token set is the same. No file is ever in memory as a whole.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from heapq import merge
from itertools import chain, count, pairwise
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import zstandard

from worker.data.sources.documents import TASK_BYTES, HoldOut, Piece, next_line, pieces
from worker.data.sources.files import NamedFiles, held_out_names
from worker.data.sources.jsonl import line_pieces
from worker.data.sources.rows import RowFormat
from worker.data.sources.text import LINE_BYTES
from worker.errors import DataError

_STEP_BYTES = 1 << 12  # decompressed at once; malicious ones expand to a hundred megabytes
_OUT_BYTES = 1 << 20


@dataclass(frozen=True)
class CompressedLinesTask:
    """Whole decompressed lines of a file, beginning with number `line`."""

    path: Path
    line: int
    content: bytes
    size: int
    row_format: RowFormat
    hold_out: HoldOut

    def pieces(self) -> Iterator[Piece]:
        for number, line in enumerate(self.content.split(b"\n"), start=self.line):
            if line.strip():
                yield from line_pieces(
                    line, self.row_format, self.hold_out, partial(str, f"{self.path}, line {number}")
                )


@dataclass(frozen=True)
class CompressedTextTask:
    """A decompressed part of a file, which is one document."""

    path: Path
    content: bytes
    size: int
    held_out: bool
    begins: bool
    ends: bool

    def pieces(self) -> Iterator[Piece]:
        try:
            yield from pieces(self.content, self.held_out, begins=self.begins, ends=self.ends)
        except UnicodeDecodeError as error:
            raise DataError(f"the text compressed in {self.path} is not UTF-8 ({error.reason}); convert it") from error


def compressed_line_tasks(
    files: NamedFiles, row_format: RowFormat, hold_out: HoldOut, task_bytes: int = TASK_BYTES
) -> Iterator[CompressedLinesTask]:
    """Yield the tasks of compressed files of JSON lines."""
    for _, path in files:
        line = 1
        for cut in _cuts(path, count(task_bytes, task_bytes)):
            yield CompressedLinesTask(path, line, cut.content, cut.size, row_format, hold_out)
            line += cut.content.count(b"\n")


def compressed_text_tasks(
    files: NamedFiles, holdout: float, task_bytes: int = TASK_BYTES
) -> Iterator[CompressedTextTask]:
    """Yield the tasks of compressed text files. The same text is held out as of uncompressed
    files."""
    several = len(files) > 1 and holdout < 1
    uncompressed = [PurePath(name).with_suffix("").as_posix() for name, _ in files]
    held_out = held_out_names(uncompressed, holdout) if several else set()
    for name, (_, path) in zip(uncompressed, files, strict=True):
        length = 0 if several else sum(len(piece) for piece, *_ in _decompressed(path))
        border = length - int(length * holdout)
        at = 0
        for cut in _cuts(path, merge(count(task_bytes, task_bytes), [border] if border else []), LINE_BYTES):
            out = name in held_out or (not several and at >= border)
            yield CompressedTextTask(path, cut.content, cut.size, out, at == 0, cut.last)
            at += len(cut.content)


class _Cut(NamedTuple):
    """Decompressed content up to the next cut; `size` compressed bytes were read for it."""

    content: bytes
    size: int
    last: bool


def _cuts(path: Path, wanted: Iterator[int], most: int | None = None) -> Iterator[_Cut]:
    """Yield the decompressed content of a file, cut at the first lines that begin at the bytes `wanted` or later, as
    `next_line` finds them. Yields at least one cut."""
    parts = pairwise(chain(_parts(path, wanted, most), [None]))
    for part, following in parts:
        assert part is not None
        yield _Cut(*part, last=following is None)


def _parts(path: Path, wanted: Iterator[int], most: int | None) -> Iterator[tuple[bytes, int] | None]:
    content, at, size, target = bytearray(), 0, 0, next(wanted)
    any_yet = False
    for piece, packed, ended in _decompressed(path):
        content += piece
        size += packed
        while end := next_line(content, target - at, most=most, ended=ended):
            yield bytes(content[:end]), size
            any_yet = True
            del content[:end]
            at, size = at + end, 0
            target = next(each for each in wanted if each > at)
    if content or not any_yet:
        yield bytes(content), size


def beginning(path: Path, size: int) -> bytes:
    """Return the first `size` bytes of the decompressed content, or all if there are fewer. Raises DataError."""
    content = b""
    for part, _, _ in _decompressed(path, size):
        content += part
        if len(content) >= size:
            break
    return content[:size]


def _decompressed(path: Path, out_bytes: int = _OUT_BYTES) -> Iterator[tuple[bytes, int, bool]]:
    """Yield the decompressed content of a file in parts of at least `out_bytes`: (content, compressed bytes read for
    it, whether it is the last). Raises DataError."""
    member: Any = None  # the current one; a file may consist of several, end to end
    out, size = bytearray(), 0
    try:
        with path.open("rb") as file:
            while packed := file.read(_STEP_BYTES):
                size += len(packed)
                while packed:
                    member = member or _decompressor(path)
                    out += member.decompress(packed)
                    packed = member.unused_data
                    if member.eof:
                        member = None
                if len(out) >= out_bytes:
                    yield bytes(out), size, False
                    out, size = bytearray(), 0
    except (zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path} is damaged ({error}); fetch it again, and prepare the set anew") from error
    if member is not None:
        raise DataError(
            f"{path} was cut short: its compressed data is incomplete; fetch it again, and prepare the set anew"
        )
    yield bytes(out), size, True


def _decompressor(path: Path) -> Any:
    if path.suffix.lower() == ".gz":
        return zlib.decompressobj(wbits=31)  # with gzip's header and checksum
    return zstandard.ZstdDecompressor().decompressobj()
