"""Parquet files. Need pyarrow (the extra `outerstep[data]`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from worker.data.sources.documents import TASK_BYTES, HoldOut, Piece
from worker.data.sources.files import NamedFiles
from worker.data.sources.rows import RowError, RowFormat, TextRows, row_pieces, without_nulls
from worker.errors import DataError

_BATCH_ROWS = 256


@dataclass(frozen=True)
class RowsTask:
    """The rows [first, stop) of a row group. `size` is their share of the bytes of the columns."""

    path: Path
    group: int
    first: int
    stop: int
    size: int
    columns: list[str]
    row_format: RowFormat
    hold_out: HoldOut

    def pieces(self) -> Iterator[Piece]:
        pyarrow = _pyarrow()
        try:
            yield from self._pieces(pyarrow)
        except (pyarrow.ArrowException, UnicodeError) as error:
            where = f"{self.path}, rows {self.first} to {self.stop - 1} of row group {self.group}"
            raise DataError(f"{where} cannot be read: {error}; fetch the file again, or repair it") from error

    def _pieces(self, pyarrow: ModuleType) -> Iterator[Piece]:
        row = 0
        with pyarrow.parquet.ParquetFile(self.path) as file:
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[self.group], columns=self.columns):
                if row + len(batch) > self.first:
                    for number, found in enumerate(batch.to_pylist(), start=row):
                        if self.first <= number < self.stop:
                            values = {name: without_nulls(value) for name, value in found.items()}
                            where = partial(str, f"{self.path}, row {number} of row group {self.group}")
                            yield from row_pieces(self.row_format, values, self.hold_out, where)
                row += len(batch)
                if row >= self.stop:
                    return


def row_tasks(
    files: NamedFiles, row_format: RowFormat, hold_out: HoldOut, task_bytes: int = TASK_BYTES
) -> Iterator[RowsTask]:
    """Yield the tasks of parquet files. Raises DataError for a file without the columns of the format."""
    for _, path in files:
        columns, groups = _groups(path, row_format)
        for group, (rows, size) in enumerate(groups):
            count = max(min(-(-size // task_bytes), rows), 1)
            for part in range(count):
                first, stop = (rows * each // count for each in (part, part + 1))
                if first < stop:
                    yield RowsTask(path, group, first, stop, size // count, columns, row_format, hold_out)


def _groups(path: Path, row_format: RowFormat) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the columns to read of a file, and for each row group its rows and the uncompressed bytes of these
    columns."""
    pyarrow = _pyarrow()
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
    try:
        columns = row_format.columns(schema.names)
    except RowError as error:
        raise DataError(f"{path}: {error}") from error
    if isinstance(row_format, TextRows):
        _check_text_column(path, row_format.column, schema, pyarrow.types)
    paths = [metadata.schema.column(j).path.split(".")[0] for j in range(metadata.num_columns)]
    places = [j for j, root in enumerate(paths) if root in columns]
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    return columns, [(group.num_rows, sum(group.column(j).total_uncompressed_size for j in places)) for group in groups]


def _check_text_column(path: Path, column: str, schema: Any, types: Any) -> None:
    kind = schema.field(column).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise DataError(f"{path}: the column {column!r} is {kind}, not text; name another (data.column, --column)")


def _pyarrow() -> ModuleType:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise DataError(
            "parquet files need pyarrow, which is not installed; run: pip install 'outerstep[data]'"
        ) from error
    return pyarrow
