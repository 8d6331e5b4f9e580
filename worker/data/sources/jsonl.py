"""JSON lines: each line is an object, one of whose members is the text of a document."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from worker.data.sources.files import Named
from worker.data.sources.pieces import TASK_BYTES, Hold, Piece, changed, document, line_start
from worker.errors import DataError


@dataclass(frozen=True)
class LinesTask:
    """The lines that begin in the bytes [start, stop) of a file of `length`; `column` has their text."""

    path: Path
    start: int
    stop: int
    length: int
    column: str
    hold: Hold
    rows = 0

    @property
    def size(self) -> int:
        return self.stop - self.start

    def pieces(self) -> Iterator[Piece]:
        with self.path.open("rb") as file:
            at, stop = (line_start(file, each, self.length) for each in (self.start, self.stop))
            file.seek(at)
            while at < stop:
                line = file.readline()
                if not line:
                    raise changed(self.path)
                if line.strip():
                    yield from line_pieces(line, self.column, self.hold, partial(self._where, at))
                at += len(line)

    def _where(self, at: int) -> str:
        """Name the line that begins at byte `at`; they are counted only now that somebody wants to know."""
        with self.path.open("rb") as file:
            before = sum(piece.count(b"\n") for piece in _pieces_of(file, at))
        return f"{self.path}, line {before + 1}"


def line_pieces(line: bytes, column: str, hold: Hold, where: Callable[[], str]) -> Iterator[Piece]:
    """Yield the document of one line. Raises DataError, by the name that `where` returns of it."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where()}: this is not JSON ({error}); mend the line or remove it") from error
    text = found.get(column) if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{where()}: {no_text(found, column)}")
    try:
        yield from document(text, hold)
    except UnicodeEncodeError as error:
        raise DataError(f"{where()}: half a character ({error}); mend the line or remove it") from error


def _pieces_of(file: Any, length: int) -> Iterator[bytes]:
    while length and (piece := file.read(min(length, 1 << 20))):
        length -= len(piece)
        yield piece


def no_text(row: Any, column: str) -> str:
    """Say why there is no text in `column` of a row."""
    if not isinstance(row, dict):
        return f"an object with a text in {column!r} is wanted, this is {type(row).__name__}"
    if column in row:
        return f"its {column!r} is {type(row[column]).__name__}, not text; name another column, or remove the row"
    return (
        f"it has no {column!r}; name the column that has the text (data.column, --column): {', '.join(map(repr, row))}"
    )


def line_tasks(files: Named, column: str, hold: Hold, task_bytes: int = TASK_BYTES) -> Iterator[LinesTask]:
    """Yield the documents of files of JSON lines."""
    for _, path in files:
        length = path.stat().st_size
        for start in range(0, length, task_bytes):
            yield LinesTask(path, start, min(start + task_bytes, length), length, column, hold)
