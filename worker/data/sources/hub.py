"""A data set of the Hugging Face hub, streamed by `datasets` (pip's `outerstep[data]`): hub:NAME[:CONFIG[:SPLIT]].

A stream can only be read from its beginning, by one process; the others tokenise what it has read. Whoever resumes
lets `datasets` skip the rows that were read before.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from worker.data.sources.jsonl import no_text
from worker.data.sources.pieces import TASK_BYTES, Hold, Piece, document
from worker.errors import DataError

PREFIX = "hub:"


@dataclass(frozen=True)
class RowsTask:
    """Rows that were read, from number `first` on."""

    source: str
    first: int
    texts: tuple[str, ...]
    size: int
    hold: Hold

    @property
    def rows(self) -> int:
        return len(self.texts)

    def pieces(self) -> Iterator[Piece]:
        for number, text in enumerate(self.texts, start=self.first):
            try:
                yield from document(text, self.hold)
            except UnicodeEncodeError as error:
                raise DataError(f"{self.source}, row {number}: half a character ({error})") from error


def hub_tasks(source: str, column: str, hold: Hold, skip: int, task_bytes: int = TASK_BYTES) -> Iterator[RowsTask]:
    """Yield the documents of a data set of the hub, but the first `skip` of them."""
    texts: list[str] = []
    size = 0
    for number, row in enumerate(_stream(source, skip), start=skip):
        text = row.get(column)
        if not isinstance(text, str):
            raise DataError(f"{source}, row {number}: {no_text(row, column)}")
        texts.append(text)
        size += len(text)
        if size >= task_bytes:
            yield RowsTask(source, skip, tuple(texts), size, hold)
            texts, size, skip = [], 0, number + 1
    if texts:
        yield RowsTask(source, skip, tuple(texts), size, hold)


def _stream(source: str, skip: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set, one after the other. What goes wrong on the way is a DataError."""
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
        rows: Iterable[Any] = datasets.load_dataset(name, config or None, split=split or "train", streaming=True).skip(
            skip
        )
        yield from rows
    except Exception as error:  # of httpx, fsspec, pyarrow, datasets and whatever else it loads by
        reason = " ".join(str(error).split())
        raise DataError(
            f"{source} cannot be read from the hub ({type(error).__name__}: {reason}); what was prepared is kept: the "
            "same command goes on from there. Private data sets need HF_TOKEN"
        ) from error
