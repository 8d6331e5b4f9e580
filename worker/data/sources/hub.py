"""Data sets of the Hugging Face hub, `hub:NAME[:CONFIG[:SPLIT]]`, streamed by `datasets` (the extra `outerstep[data]`).

A stream can only be read by one process; the others tokenise what it has read.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from worker.data.sources.documents import Piece, Task
from worker.data.sources.rows import Rows
from worker.errors import DataError

PREFIX = "hub:"


def hub_tasks(source: str, rows: Rows, task_bytes: int) -> Iterator[Task]:
    """Yield the tasks of a data set of the hub."""
    collected: list[Piece] = []
    size = 0
    for number, row in enumerate(_stream(source)):
        for piece in rows.pieces_of_table(row, f"{source}, row {number}"):
            collected.append(piece)
            size += piece.size
        if size >= task_bytes:
            yield Task(size, partial(tuple, collected))
            collected, size = [], 0
    if collected:
        yield Task(size, partial(tuple, collected))


def _stream(source: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set. Raises DataError whatever goes wrong."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DataError(
            f"{source} needs datasets, which is not installed; run: pip install 'outerstep[data]'"
        ) from error
    name, *rest = source.removeprefix(PREFIX).split(":")
    config, split = (rest + [""] * 2)[:2]
    if not name or len(rest) > 2:
        raise DataError(f"data.source = {source!r} is not hub:NAME, hub:NAME:CONFIG or hub:NAME:CONFIG:SPLIT")
    try:
        rows: Iterable[Any] = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        yield from rows
    except Exception as error:  # from httpx, fsspec, pyarrow, datasets or whatever else it loads with
        reason = " ".join(str(error).split())
        raise DataError(
            f"{source} cannot be read from the hub ({type(error).__name__}: {reason}); run the same command "
            "again when it can. Private data sets need HF_TOKEN"
        ) from error
