"""Documents cut into pieces, and tasks: parts of about 8 MiB of a source, each tokenised by any process independently.

Task boundaries depend only on the source. So the documents and their order are the same, however many processes there
are and whichever of them reads which task.

A document longer than a piece is tokenised piece by piece, cut at the end of a line if possible: no tokenizer takes a
gigabyte at once. A cut changes at most the tokens next to it.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

TASK_BYTES = 8 << 20
PIECE_BYTES = 1 << 17


@dataclass(frozen=True)
class Piece:
    """A piece of a document, `size` bytes in UTF-8."""

    text: str
    size: int
    begins: bool  # the document begins with this piece
    ends: bool  # the document ends with this piece
    held_out: bool
    where: str = ""  # the file and line of a conversation, for errors
    fault: str | None = None  # why a row is no conversation; it has no text then


@dataclass(frozen=True)
class Task:
    """A part of a source that is tokenised at once, `size` of the source's bytes. It can be sent to another process.

    `pieces` returns its text, in order. Raises DataError if it cannot be read.
    """

    size: int
    pieces: Callable[[], Iterable[Piece]]


def pieces(content: bytes, held_out: bool, *, begins: bool = True, ends: bool = True) -> Iterator[Piece]:
    """Yield the pieces of UTF-8 text; none if it is empty. `begins`, `ends`: whether the document begins and ends with
    this text. Raises UnicodeDecodeError."""
    at = 0
    while at < len(content):
        stop = _cut(content, at)
        text = content[at:stop].decode()
        yield Piece(text, stop - at, begins and at == 0, ends and stop == len(content), held_out)
        at = stop


def _cut(content: bytes, at: int) -> int:
    """Return the end of the piece that begins at `at`: after a line, or else after a character."""
    stop = at + PIECE_BYTES
    if stop >= len(content):
        return len(content)
    after_line = content.rfind(b"\n", at, stop) + 1
    return after_line or character_start(content, stop, -1)


def character_start(content: bytes, at: int, step: int) -> int:
    """Return the nearest start of a character from `at` in direction `step`; `at` if the content is not UTF-8."""
    for distance in range(4):
        place = at + step * distance
        if 0 <= place < len(content) and content[place] & 0xC0 != 0x80:
            return place
    return at
