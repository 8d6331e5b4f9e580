"""JSON lines: each line is an object, a row."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from worker.data.sources.documents import TASK_BYTES, HoldOut, Piece, line_start
from worker.data.sources.files import NamedFiles, changed
from worker.data.sources.rows import RowFormat, faulty, row_pieces


@dataclass(frozen=True)
class LinesTask:
    """The lines of a file of `length` bytes that begin in the bytes [start, stop)."""

    path: Path
    start: int
    stop: int
    length: int
    row_format: RowFormat
    hold_out: HoldOut

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
                    yield from line_pieces(line, self.row_format, self.hold_out, partial(self._where, at))
                at += len(line)

    def _where(self, at: int) -> str:
        """Return the file and the number of the line that begins at byte `at`. Lines are counted only for errors."""
        with self.path.open("rb") as file:
            before = sum(chunk.count(b"\n") for chunk in _chunks(file, at))
        return f"{self.path}, line {before + 1}"


def line_pieces(line: bytes, row_format: RowFormat, hold_out: HoldOut, where: Callable[[], str]) -> Iterator[Piece]:
    """Yield the text of one line, which `where()` names: see `row_pieces`."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        yield faulty(row_format, f"not valid JSON ({error}); fix the line or remove it", where)
        return
    yield from row_pieces(row_format, found, hold_out, where)


def _chunks(file: Any, length: int) -> Iterator[bytes]:
    while length and (chunk := file.read(min(length, 1 << 20))):
        length -= len(chunk)
        yield chunk


def line_tasks(
    files: NamedFiles, row_format: RowFormat, hold_out: HoldOut, task_bytes: int = TASK_BYTES
) -> Iterator[LinesTask]:
    """Yield the tasks of files of JSON lines."""
    for _, path in files:
        length = path.stat().st_size
        for start in range(0, length, task_bytes):
            yield LinesTask(path, start, min(start + task_bytes, length), length, row_format, hold_out)
