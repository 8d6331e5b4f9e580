"""JSON lines: each line is an object, a row."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

from worker.data.sources.contents import Part, parts
from worker.data.sources.documents import TASK_BYTES, HoldOut, Piece
from worker.data.sources.files import NamedFiles
from worker.data.sources.rows import RowFormat, faulty, row_pieces


@dataclass(frozen=True)
class LinesTask:
    """Whole lines of a file, beginning with number `line`."""

    part: Part
    line: int
    row_format: RowFormat
    hold_out: HoldOut

    @property
    def size(self) -> int:
        return self.part.size

    def pieces(self) -> Iterator[Piece]:
        for number, line in enumerate(self.part.content.split(b"\n"), start=self.line):
            if line.strip():
                yield from self._row(line, partial(str, f"{self.part.path}, line {number}"))

    def _row(self, line: bytes, where: Callable[[], str]) -> Iterator[Piece]:
        """Yield the text of one line, which `where()` names: see `row_pieces`."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield faulty(self.row_format, f"not valid JSON ({error}); fix the line or remove it", where)
        else:
            yield from row_pieces(self.row_format, row, self.hold_out, where)


def line_tasks(
    files: NamedFiles, row_format: RowFormat, hold_out: HoldOut, task_bytes: int = TASK_BYTES
) -> Iterator[LinesTask]:
    """Yield the tasks of files of JSON lines."""
    for _, path in files:
        line = 1
        for part in parts(path, count(task_bytes, task_bytes)):
            yield LinesTask(part, line, row_format, hold_out)
            line += part.content.count(b"\n")
