"""Parquet files: each row of a text column is a document. Needs pyarrow (the extra `outerstep[data]`)."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from worker.data.sources.documents import TASK_BYTES, HoldOut, Piece, document
from worker.data.sources.files import NamedFiles
from worker.errors import DataError

_BATCH_ROWS = 256


@dataclass(frozen=True)
class RowsTask:
    """The rows [first, stop) of a row group. `size` is their share of the column's bytes."""

    path: Path
    group: int
    first: int
    stop: int
    size: int
    column: str
    hold_out: HoldOut
    rows = 0

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
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[self.group], columns=[self.column]):
                if row + len(batch) > self.first:
                    for number, text in enumerate(batch.column(0).to_pylist(), start=row):
                        if self.first <= number < self.stop:
                            yield from self._document(text, number)
                row += len(batch)
                if row >= self.stop:
                    return

    def _document(self, text: str | None, number: int) -> Iterator[Piece]:
        if text is None:
            raise DataError(
                f"{self.path}, row {number} of row group {self.group}: its {self.column!r} is null, not text; name "
                "another column, or remove the row"
            )
        yield from document(text, self.hold_out)


def row_tasks(files: NamedFiles, column: str, hold_out: HoldOut, task_bytes: int = TASK_BYTES) -> Iterator[RowsTask]:
    """Yield the tasks of parquet files. Raises DataError for a file without a text column of that name."""
    for _, path in files:
        for group, (rows, size) in enumerate(_groups(path, column)):
            count = max(min(-(-size // task_bytes), rows), 1)
            for part in range(count):
                first, stop = (rows * each // count for each in (part, part + 1))
                if first < stop:
                    yield RowsTask(path, group, first, stop, size // count, column, hold_out)


def _groups(path: Path, column: str) -> list[tuple[int, int]]:
    """Return for each row group of a file its rows and the uncompressed bytes of the column."""
    pyarrow = _pyarrow()
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
    if column not in schema.names:
        raise DataError(
            f"{path} has no column {column!r}; name the column with the text (data.column, --column), one of "
            f"{', '.join(map(repr, schema.names))}"
        )
    kind, types = schema.field(column).type, pyarrow.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise DataError(f"{path}: the column {column!r} is {kind}, not text; name another (data.column, --column)")
    place = [metadata.schema.column(j).path for j in range(metadata.num_columns)].index(column)
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    return [(group.num_rows, group.column(place).total_uncompressed_size) for group in groups]


def _pyarrow() -> ModuleType:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise DataError(
            "parquet files need pyarrow, which is not installed; run: pip install 'outerstep[data]'"
        ) from error
    return pyarrow
