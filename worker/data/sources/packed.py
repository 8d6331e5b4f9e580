"""Compressed files of JSON lines or text, by gzip (RFC 1952) or zstd (RFC 8878), which are read from their beginning.

One process unpacks them and cuts what comes out where a plain file would be cut, and the others tokenise that: so the
set is the same one. No file is ever whole in memory. Whoever resumes unpacks the file again that the last process was
at, and none before it.
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

from worker.data.sources.files import Named, held_out_names
from worker.data.sources.jsonl import line_pieces
from worker.data.sources.pieces import TASK_BYTES, Hold, Piece, next_line, pieces
from worker.data.sources.text import LINE_BYTES
from worker.errors import DataError

_FILE = 1 << 40  # a place is the number of a file times this, and of the tasks of it that come before
_STEP_BYTES = 1 << 12  # that are unpacked at once: hostile ones become a hundred megabytes
_OUT_BYTES = 1 << 20


@dataclass(frozen=True)
class PackedLinesTask:
    """Whole lines that were unpacked of a file, from number `line` on; `column` has their text. `rows` leads from its
    own place to the next task's."""

    path: Path
    line: int
    content: bytes
    size: int
    rows: int
    column: str
    hold: Hold

    def pieces(self) -> Iterator[Piece]:
        for number, line in enumerate(self.content.split(b"\n"), start=self.line):
            if line.strip():
                yield from line_pieces(line, self.column, self.hold, partial(str, f"{self.path}, line {number}"))


@dataclass(frozen=True)
class PackedTextTask:
    """A part that was unpacked of a file, which is one document. `rows` as above."""

    path: Path
    content: bytes
    size: int
    rows: int
    held_out: bool
    begins: bool
    ends: bool

    def pieces(self) -> Iterator[Piece]:
        try:
            yield from pieces(self.content, self.held_out, begins=self.begins, ends=self.ends)
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path} unpacks to what is not UTF-8 ({error.reason}); convert it") from error


def packed_line_tasks(
    files: Named, column: str, hold: Hold, place: int, task_bytes: int = TASK_BYTES
) -> Iterator[PackedLinesTask]:
    """Yield the documents of compressed files of JSON lines, from a place on."""
    first, skipped = divmod(place, _FILE)
    for _, path in files[first:]:
        line = 1
        for cut in _cuts(path, count(task_bytes, task_bytes)):
            if cut.number >= skipped:
                yield PackedLinesTask(path, line, cut.content, cut.size, cut.rows, column, hold)
            line += cut.content.count(b"\n")
        skipped = 0


def packed_text_tasks(
    files: Named, holdout: float, place: int, task_bytes: int = TASK_BYTES
) -> Iterator[PackedTextTask]:
    """Yield the text of compressed files, from a place on. Held out is what would be of the same files, plain."""
    several = len(files) > 1 and holdout < 1
    plain = [PurePath(name).with_suffix("").as_posix() for name, _ in files]
    held_out = held_out_names(plain, holdout) if several else set()
    first, skipped = divmod(place, _FILE)
    for name, (_, path) in list(zip(plain, files, strict=True))[first:]:
        length = 0 if several else sum(len(piece) for piece, *_ in _unpacked(path))
        border = length - int(length * holdout)
        at = 0
        for cut in _cuts(path, merge(count(task_bytes, task_bytes), [border] if border else []), LINE_BYTES):
            if cut.number >= skipped:
                out = name in held_out or (not several and at >= border)
                yield PackedTextTask(path, cut.content, cut.size, cut.rows, out, at == 0, cut.last)
            at += len(cut.content)
        skipped = 0


class _Cut(NamedTuple):
    """What the bytes of a file up to the next cut unpack to: `size` of them were read for it."""

    number: int
    content: bytes
    size: int
    last: bool

    @property
    def rows(self) -> int:
        return _FILE - self.number if self.last else 1


def _cuts(path: Path, wanted: Iterator[int], most: int | None = None) -> Iterator[_Cut]:
    """Yield what a file unpacks to, cut at the first lines that begin at the bytes `wanted` or later, as `next_line`
    finds them; at least one cut."""
    parts = pairwise(chain(_parts(path, wanted, most), [None]))
    for number, (part, following) in enumerate(parts):
        assert part is not None
        yield _Cut(number, *part, last=following is None)


def _parts(path: Path, wanted: Iterator[int], most: int | None) -> Iterator[tuple[bytes, int] | None]:
    content, at, size, target = bytearray(), 0, 0, next(wanted)
    any_yet = False
    for piece, packed, ended in _unpacked(path):
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


def _unpacked(path: Path) -> Iterator[tuple[bytes, int, bool]]:
    """Yield what a file unpacks to, in pieces, with how many of its bytes each of them is made of, and whether it is
    the last one. Raises DataError."""
    member: Any = None  # the one that is being unpacked: there may be several, end to end
    out, size = bytearray(), 0
    try:
        with path.open("rb") as file:
            while packed := file.read(_STEP_BYTES):
                size += len(packed)
                while packed:
                    member = member or _unpacker(path)
                    out += member.decompress(packed)
                    packed = member.unused_data
                    if member.eof:
                        member = None
                if len(out) >= _OUT_BYTES:
                    yield bytes(out), size, False
                    out, size = bytearray(), 0
    except (zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path} is damaged ({error}): fetch it again, and begin the set anew") from error
    if member is not None:
        raise DataError(
            f"{path} was cut short: it ends before what is compressed in it; fetch it again, and begin the set anew"
        )
    yield bytes(out), size, True


def _unpacker(path: Path) -> Any:
    if path.suffix.lower() == ".gz":
        return zlib.decompressobj(wbits=31)  # with gzip's head and checksum
    return zstandard.ZstdDecompressor().decompressobj()
