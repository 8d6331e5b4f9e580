"""JSON lines: each line is an object, a row."""

import json
from collections.abc import Iterator
from functools import partial
from itertools import count

from worker.data.sources.contents import Part, parts
from worker.data.sources.documents import Piece, Task
from worker.data.sources.files import NamedFiles
from worker.data.sources.rows import Rows


def line_tasks(files: NamedFiles, rows: Rows, task_bytes: int) -> Iterator[Task]:
    """Yield the tasks of files of JSON lines: whole lines each."""
    for _, path in files:
        line = 1
        for part in parts(path, count(task_bytes, task_bytes)):
            yield Task(part.size, partial(_pieces, part, line, rows))
            line += part.content.count(b"\n")


def _pieces(part: Part, first: int, rows: Rows) -> Iterator[Piece]:
    """Yield the text of the lines, which begin with number `first`."""
    for number, line in enumerate(part.content.split(b"\n"), start=first):
        if line.strip():
            where = f"{part.path}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield rows.faulty(f"not valid JSON ({error}); fix the line or remove it", where)
            else:
                yield from rows.pieces(row, where)
