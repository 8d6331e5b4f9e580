"""A source of text: the files or the data set of the hub that `data.source` names."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.data.sources.documents import TASK_BYTES, Task
from worker.data.sources.files import NamedFiles, source_files
from worker.data.sources.hub import PREFIX, hub_tasks
from worker.data.sources.jsonl import line_tasks
from worker.data.sources.kinds import BIN, COMPRESSED_JSONL, COMPRESSED_TEXT, HUB, JSONL, PARQUET, TEXT, kind_of_files
from worker.data.sources.parquet import row_tasks
from worker.data.sources.rows import Rows
from worker.data.sources.text import text_tasks
from worker.errors import DataError

_TASKS: dict[str, Callable[[NamedFiles, Rows, int], Iterator[Task]]] = {
    TEXT: text_tasks,
    COMPRESSED_TEXT: text_tasks,
    JSONL: line_tasks,
    COMPRESSED_JSONL: line_tasks,
    PARQUET: row_tasks,
}


@dataclass(frozen=True)
class Source:
    """Files of one kind, or a data set of the hub."""

    name: str
    kind: str
    files: NamedFiles
    rows: Rows

    @property
    def size(self) -> int | None:
        """Its size in bytes; None if unknown."""
        return None if self.kind == HUB else sum(path.stat().st_size for _, path in self.files)

    def identity(self) -> list[Any]:
        """Return values that distinguish it from any other source, and change if a file is changed."""
        files = [(name, *_stamp(path)) for name, path in self.files]
        return [self.kind, self.name if self.kind == HUB else files, *self.rows.identity()]

    def tasks(self, task_bytes: int = TASK_BYTES) -> Iterator[Task]:
        """Yield its tasks. Raises DataError."""
        if self.kind == HUB:
            return hub_tasks(self.name, self.rows, task_bytes)
        if self.kind == BIN:
            raise DataError(
                f"data.source = {self.name!r}: {self.files[0][0]} is not text but {BIN}; data.source accepts them "
                "without preparing"
            )
        return _TASKS[self.kind](self.files, self.rows, task_bytes)


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes with a file's content. The time of a change can be set (`rsync -t`, `cp -p`), that of the
    last change of the inode cannot."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def find_source(name: str, rows: Rows) -> Source:
    """Return the source called `name`. Raises DataError if there are no such files, or if they do not contain rows of
    this format or text (`kind_of_files`)."""
    if name.startswith(PREFIX):
        return Source(name, HUB, [], rows)
    files = source_files(name)
    kind = kind_of_files(name, files)
    if rows.format != "text" and kind in (TEXT, COMPRESSED_TEXT, BIN):
        raise DataError(
            f"data.source = {name!r}: {files[0][0]} is {kind}, but conversations are read from .jsonl or .parquet "
            "files, or from the hub"
        )
    return Source(name, kind, files, rows)
