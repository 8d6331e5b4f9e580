"""A source of text as it is named: `data.source`, and what its files are by their names."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath
from typing import Any

from outerstep.common.connections import error_text
from worker.data.sources.binary import check_text
from worker.data.sources.files import Named, source_files
from worker.data.sources.hub import PREFIX, hub_tasks
from worker.data.sources.jsonl import line_tasks
from worker.data.sources.packed import packed_line_tasks, packed_text_tasks
from worker.data.sources.parquet import row_tasks
from worker.data.sources.pieces import TASK_BYTES, Hold, Task
from worker.data.sources.text import text_tasks
from worker.errors import DataError

TEXT, JSONL, PARQUET, BIN, PACKED, HUB = "text", "JSON lines", "parquet", "tokens", "compressed files", "hub"
PACKED_TEXT, PACKED_JSONL = "compressed text", "compressed JSON lines"
_KINDS = {".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET, ".bin": BIN}
_KINDS |= dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip"), PACKED)
for _ending in (".gz", ".zst"):  # C4's files are .json.gz
    _KINDS |= {f".txt{_ending}": PACKED_TEXT}
    _KINDS |= dict.fromkeys((f".jsonl{_ending}", f".ndjson{_ending}", f".json{_ending}"), PACKED_JSONL)


@dataclass(frozen=True)
class Source:
    """A source of text: its files, or a data set of the hub. `holdout` is the share that is held out; 1 for all."""

    name: str
    kind: str
    files: Named
    column: str
    holdout: float

    @property
    def size(self) -> int | None:
        """Its bytes; None if nobody knows."""
        return None if self.kind == HUB else sum(path.stat().st_size for _, path in self.files)

    def identity(self) -> list[Any]:
        """Return what tells it from any other, and from what it was before somebody changed a file."""
        files = [(name, status.st_size, status.st_mtime_ns) for name, status in ((n, p.stat()) for n, p in self.files)]
        return [self.kind, self.name if self.kind == HUB else files, self.column, self.holdout]

    def tasks(self, done: int, rows: int, task_bytes: int = TASK_BYTES) -> Iterator[Task]:
        """Yield its tasks, but the first `done` of them, which had so many rows of a stream. Raises DataError."""
        hold = Hold(self.holdout)
        if self.kind == HUB:
            return hub_tasks(self.name, self.column, hold, rows, task_bytes)
        tasks: Iterator[Task]
        if self.kind == JSONL:
            tasks = line_tasks(self.files, self.column, hold, task_bytes)
        elif self.kind == PACKED_JSONL:
            return packed_line_tasks(self.files, self.column, hold, rows, task_bytes)
        elif self.kind == PACKED_TEXT:
            return packed_text_tasks(self.files, self.holdout, rows, task_bytes)
        elif self.kind == PARQUET:
            tasks = row_tasks(self.files, self.column, hold, task_bytes)
        else:
            tasks = text_tasks(self.files, self.holdout, task_bytes)
        return islice(tasks, done, None)


def find_source(name: str, column: str, holdout: float) -> Source:
    """Return the source called `name`, which has text. Raises DataError if it has none, files of several kinds,
    or a file that is text by its name alone."""
    if name.startswith(PREFIX):
        return Source(name, HUB, [], column, holdout)
    files = source_files(name)
    kinds = {kind_of(file): file for file, _ in files}
    if len(kinds) > 1:
        mixed = ", ".join(f"{kind} ({file})" for kind, file in sorted(kinds.items()))
        raise DataError(
            f"data.source = {name!r} has files of several kinds: {mixed}; name those of one, as DIR/*.jsonl"
        )
    (kind,) = kinds
    if kind in (PACKED, BIN):
        remedy = (
            "only .jsonl and .txt with .gz or .zst are unpacked here"
            if kind == PACKED
            else "data.source takes them as they are"
        )
        raise DataError(f"data.source = {name!r}: {kinds[kind]} is not text but {kind}; {remedy}")
    if kind == TEXT:
        try:
            check_text(name, files)
        except OSError as error:
            raise DataError(f"data.source = {name!r}: {error_text(error)}") from error
    return Source(name, kind, files, column, holdout)


def kind_of(file: str) -> str:
    """Return the kind of a file, by the end of its name."""
    suffixes = [suffix.lower() for suffix in PurePath(file).suffixes[-2:]] or [""]
    return _KINDS.get("".join(suffixes)) or _KINDS.get(suffixes[-1], TEXT)


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
