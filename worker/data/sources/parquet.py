"""Parquet files. Need pyarrow (the extra `outerstep[data]`)."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from worker.data.sources.documents import Piece, Task
from worker.data.sources.files import NamedFiles
from worker.data.sources.rows import RowError, Rows
from worker.errors import DataError

_BATCH_ROWS = 256


def row_tasks(files: NamedFiles, rows: Rows, task_bytes: int) -> Iterator[Task]:
    """Yield the tasks of parquet files: rows of a row group each. Raises DataError for a file without the columns of
    the format."""
    for _, path in files:
        columns, groups = _groups(path, rows)
        for group, (count, size) in enumerate(groups):
            parts = max(min(-(-size // task_bytes), count), 1)
            for part in range(parts):
                first, stop = (count * each // parts for each in (part, part + 1))
                if first < stop:
                    yield Task(size // parts, partial(_pieces, path, group, first, stop, columns, rows))


def _pieces(path: Path, group: int, first: int, stop: int, columns: list[str], rows: Rows) -> Iterator[Piece]:
    """Yield the text of the rows [first, stop) of a row group."""
    pyarrow, row = _pyarrow(), 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns):
                if row + len(batch) > first:
                    for number, found in enumerate(batch.to_pylist(), start=row):
                        if first <= number < stop:
                            yield from rows.pieces_of_table(found, f"{path}, row {number} of row group {group}")
                row += len(batch)
                if row >= stop:
                    return
    except (pyarrow.ArrowException, UnicodeError) as error:
        where = f"{path}, rows {first} to {stop - 1} of row group {group}"
        raise DataError(f"{where} cannot be read: {error}; fetch the file again, or repair it") from error


def _groups(path: Path, rows: Rows) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the columns to read of a file, and for each row group its rows and the uncompressed bytes of these
    columns."""
    pyarrow = _pyarrow()
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
    try:
        columns = rows.columns(schema.names)
    except RowError as error:
        raise DataError(f"{path}: {error}") from error
    if rows.format == "text":
        _check_text_column(path, rows.column, schema, pyarrow.types)
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
