"""A source of text: what `data.source` names, and the format of its files by the ends of their names."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import PurePath
from typing import Any

from outerstep.common.connections import error_text
from worker.data.sources.compressed import compressed_line_tasks, compressed_text_tasks
from worker.data.sources.documents import TASK_BYTES, HoldOut, Task
from worker.data.sources.files import NamedFiles, check_text, source_files
from worker.data.sources.hub import PREFIX, hub_tasks
from worker.data.sources.jsonl import line_tasks
from worker.data.sources.parquet import row_tasks
from worker.data.sources.rows import RowFormat, TextRows
from worker.data.sources.text import text_tasks
from worker.errors import DataError

TEXT, JSONL, PARQUET, BIN, ARCHIVE, HUB = "text", "JSON lines", "parquet", "tokens", "compressed files", "hub"
COMPRESSED_TEXT, COMPRESSED_JSONL = "compressed text", "compressed JSON lines"
_ROWS = (JSONL, COMPRESSED_JSONL, PARQUET)
_KINDS = {".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET, ".bin": BIN}
_KINDS |= dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip"), ARCHIVE)
for _ending in (".gz", ".zst"):  # C4's files are .json.gz
    _KINDS |= {f".txt{_ending}": COMPRESSED_TEXT}
    _KINDS |= dict.fromkeys((f".jsonl{_ending}", f".ndjson{_ending}", f".json{_ending}"), COMPRESSED_JSONL)


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
        files = [(name, status.st_size, status.st_mtime_ns) for name, status in ((n, p.stat()) for n, p in self.files)]
        return [self.kind, self.name if self.kind == HUB else files, *self.row_format.identity(), self.holdout]

    def tasks(self, done: int, rows: int, task_bytes: int = TASK_BYTES) -> Iterator[Task]:
        """Yield its tasks, except the first `done`, which had `rows` rows (see `Task.rows`). Raises DataError."""
        hold_out = HoldOut(self.holdout)
        if self.kind == HUB:
            return hub_tasks(self.name, self.row_format, hold_out, rows, task_bytes)
        tasks: Iterator[Task]
        if self.kind == JSONL:
            tasks = line_tasks(self.files, self.row_format, hold_out, task_bytes)
        elif self.kind == COMPRESSED_JSONL:
            return compressed_line_tasks(self.files, self.row_format, hold_out, rows, task_bytes)
        elif self.kind == COMPRESSED_TEXT:
            return compressed_text_tasks(self.files, self.holdout, rows, task_bytes)
        elif self.kind == PARQUET:
            tasks = row_tasks(self.files, self.row_format, hold_out, task_bytes)
        else:
            tasks = text_tasks(self.files, self.holdout, task_bytes)
        return islice(tasks, done, None)


def find_source(name: str, row_format: RowFormat, holdout: float) -> TextSource:
    """Return the source of text called `name`. Raises DataError if there are no such files, if they are of several
    kinds, or if they do not contain rows of this format or text."""
    if name.startswith(PREFIX):
        return TextSource(name, HUB, [], row_format, holdout)
    files = source_files(name)
    kinds = {kind_of(file): file for file, _ in files}
    if len(kinds) > 1:
        mixed = ", ".join(f"{kind} ({file})" for kind, file in sorted(kinds.items()))
        raise DataError(
            f"data.source = {name!r} has files of several kinds: {mixed}; select one kind, as in DIR/*.jsonl"
        )
    (kind,) = kinds
    if kind not in _ROWS and not isinstance(row_format, TextRows):
        raise DataError(
            f"data.source = {name!r}: {kinds[kind]} is {kind}, but conversations are read from .jsonl, .ndjson or "
            ".parquet files, or from the hub"
        )
    if kind in (ARCHIVE, BIN):
        remedy = (
            "only .jsonl and .txt followed by .gz or .zst can be read compressed"
            if kind == ARCHIVE
            else "data.source accepts them without preparing"
        )
        raise DataError(f"data.source = {name!r}: {kinds[kind]} is not text but {kind}; {remedy}")
    if kind == TEXT:
        try:
            check_text(name, files)
        except OSError as error:
            raise DataError(f"data.source = {name!r}: {error_text(error)}") from error
    return TextSource(name, kind, files, row_format, holdout)


def kind_of(file: str) -> str:
    """Return the kind of a file by the end of its name."""
    suffixes = [suffix.lower() for suffix in PurePath(file).suffixes[-2:]] or [""]
    return _KINDS.get("".join(suffixes)) or _KINDS.get(suffixes[-1], TEXT)
