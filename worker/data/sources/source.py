"""A source of text: the files or the data set of the hub that `data.source` names."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.data.sources.documents import TASK_BYTES, HoldOut, Task
from worker.data.sources.files import NamedFiles, source_files
from worker.data.sources.hub import PREFIX, hub_tasks
from worker.data.sources.jsonl import line_tasks
from worker.data.sources.kinds import BIN, COMPRESSED_JSONL, HUB, JSONL, PARQUET, kind_of_files
from worker.data.sources.parquet import row_tasks
from worker.data.sources.rows import RowFormat, TextRows
from worker.data.sources.text import text_tasks
from worker.errors import DataError

_ROWS = (JSONL, COMPRESSED_JSONL, PARQUET)


@dataclass(frozen=True)
class TextSource:
    """A source of text: files, or a data set of the hub. `holdout` is the share that is held out; 1 for everything."""

    name: str
    kind: str
    files: NamedFiles
    row_format: RowFormat
    holdout: float

    @property
    def size(self) -> int | None:
        """Its size in bytes; None if unknown."""
        return None if self.kind == HUB else sum(path.stat().st_size for _, path in self.files)

    def identity(self) -> list[Any]:
        """Return values that distinguish it from any other source, and change if a file is changed."""
        files = [(name, *_stamp(path)) for name, path in self.files]
        return [self.kind, self.name if self.kind == HUB else files, *self.row_format.identity(), self.holdout]

    def tasks(self, task_bytes: int = TASK_BYTES) -> Iterator[Task]:
        """Yield its tasks. Raises DataError."""
        hold_out = HoldOut(self.holdout)
        if self.kind == HUB:
            return hub_tasks(self.name, self.row_format, hold_out, task_bytes)
        if self.kind in (JSONL, COMPRESSED_JSONL):
            return line_tasks(self.files, self.row_format, hold_out, task_bytes)
        if self.kind == PARQUET:
            return row_tasks(self.files, self.row_format, hold_out, task_bytes)
        return text_tasks(self.files, self.holdout, task_bytes)


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes with a file's content. The time of a change can be set (`rsync -t`, `cp -p`), that of the
    last change of the inode cannot."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def find_source(name: str, row_format: RowFormat, holdout: float) -> TextSource:
    """Return the source of text called `name`. Raises DataError if there are no such files, or if they do not contain
    rows of this format or text (`kind_of_files`)."""
    if name.startswith(PREFIX):
        return TextSource(name, HUB, [], row_format, holdout)
    files = source_files(name)
    kind = kind_of_files(name, files)
    if kind not in _ROWS and not isinstance(row_format, TextRows):
        raise DataError(
            f"data.source = {name!r}: {files[0][0]} is {kind}, but conversations are read from .jsonl or .parquet "
            "files, or from the hub"
        )
    if kind == BIN:
        raise DataError(
            f"data.source = {name!r}: {files[0][0]} is not text but {kind}; data.source accepts them without preparing"
        )
    return TextSource(name, kind, files, row_format, holdout)
