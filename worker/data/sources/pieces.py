"""Documents in pieces, and tasks: parts of a source, about 8 MiB of it, each of which any process can read by itself.

Where a task begins and ends is decided by the source alone, so that the documents are the same, in the same order,
however many processes there are and whichever of them reads what.

A document longer than a piece is tokenised piece by piece, cut after a line where there is one: no tokenizer takes a
gigabyte at once, and what a cut changes is at most the token beside it.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Protocol

from worker.data.sources.files import draw
from worker.errors import DataError

TASK_BYTES = 8 << 20
PIECE_BYTES = 1 << 17
_STEP_BYTES = 1 << 16


@dataclass(frozen=True)
class Piece:
    """A piece of a document, `size` bytes in UTF-8."""

    text: str
    size: int
    begins: bool  # the document
    ends: bool
    held_out: bool


class Task(Protocol):
    """A part of a source that is tokenised at once. It can be sent to another process."""

    @property
    def size(self) -> int:
        """How much of the source it is, in the source's bytes."""

    @property
    def rows(self) -> int:
        """How many rows of a source that can only be read from its beginning; 0 for any other."""

    def pieces(self) -> Iterator[Piece]:
        """Yield its text, in order. Raises DataError where it cannot be read."""


@dataclass(frozen=True)
class Hold:
    """Which documents are held out: this share of them, by the digest of their text; all, if it is 1.

    So a text that is there twice is never both trained on and held out, and neither the tokenizer nor what else there
    is, or in which order, changes which are.
    """

    share: float

    def __call__(self, text: bytes) -> bool:
        return draw(text) < self.share


def document(text: str, hold: Hold) -> Iterator[Piece]:
    """Yield a document in pieces; nothing if it is empty. Raises UnicodeEncodeError for half a character."""
    content = text.encode()
    if 0 < len(content) <= PIECE_BYTES:
        yield Piece(text, len(content), begins=True, ends=True, held_out=hold(content))
    elif content:
        yield from pieces(content, hold(content))


def pieces(content: bytes, held_out: bool, *, begins: bool = True, ends: bool = True) -> Iterator[Piece]:
    """Yield the pieces of UTF-8. `begins`, `ends`: whether the document does, with it. Raises UnicodeDecodeError."""
    at = 0
    while at < len(content):
        stop = _cut(content, at)
        text = content[at:stop].decode()
        yield Piece(text, stop - at, begins and at == 0, ends and stop == len(content), held_out)
        at = stop


def _cut(content: bytes, at: int) -> int:
    """Return where the piece that begins at `at` ends: after a line, or at least after a character."""
    stop = at + PIECE_BYTES
    if stop >= len(content):
        return len(content)
    after_line = content.rfind(b"\n", at, stop) + 1
    return after_line or _character_start(content, stop, -1)


def _character_start(content: bytes, at: int, step: int) -> int:
    """Return the nearest beginning of a character from `at` on, in this direction; of what is no UTF-8, `at`."""
    for distance in range(4):
        place = at + step * distance
        if 0 <= place < len(content) and content[place] & 0xC0 != 0x80:
            return place
    return at


def line_start(file: IO[bytes], at: int, length: int, *, most: int | None = None) -> int:
    """Return where the first line that begins at byte `at` or later does, in a file of this length.

    If there is none within `most` bytes, a character does instead of a line.
    """
    if at == 0 or at >= length:
        return min(at, length)
    for begin in range(at - 1, length, _STEP_BYTES):
        content = os.pread(file.fileno(), _STEP_BYTES, begin)
        found = content.find(b"\n")
        if found >= 0:
            return begin + found + 1
        if most is not None and begin + _STEP_BYTES > at + most:
            start = os.pread(file.fileno(), 4, at)
            return at + _character_start(start, 0, 1)
    return length


def next_line(content: bytearray, at: int, *, most: int | None, ended: bool) -> int:
    """Return where `line_start` would find a line, at > 0, if the stream that begins with this content were a file,
    `most` a step or None; 0 where that is not to be seen yet, or if the stream has `ended`, at its end."""
    stop = len(content) if most is None else at - 1 + 2 * most
    found = content.find(b"\n", at - 1, stop) + 1
    if not found and most is not None and len(content) >= (at + most if ended else stop):
        return at + _character_start(bytes(content[at : at + 4]), 0, 1)
    return found


def changed(path: object) -> DataError:
    """Return the error of a file that is not as long as it was."""
    return DataError(f"{path} changed while it was read; let nobody write to it, and start again")
