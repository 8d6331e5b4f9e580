"""Data sets of the Hugging Face hub, `hub:NAME[:CONFIG[:SPLIT]]`, streamed by `datasets` (the extra `outerstep[data]`).

A stream can only be read from its beginning, by one process; the others tokenise what it has read. When preparing
resumes, `datasets` skips the rows that were read before.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from worker.data.sources.documents import TASK_BYTES, HoldOut, Piece, document
from worker.data.sources.jsonl import no_text
from worker.errors import DataError

PREFIX = "hub:"


@dataclass(frozen=True)
class RowsTask:
    """Rows of the stream, beginning with number `first`."""

    source: str
    first: int
    texts: tuple[str, ...]
    size: int
    hold_out: HoldOut

    @property
    def rows(self) -> int:
        return len(self.texts)

    def pieces(self) -> Iterator[Piece]:
        for number, text in enumerate(self.texts, start=self.first):
            try:
                yield from document(text, self.hold_out)
            except UnicodeEncodeError as error:
                raise DataError(f"{self.source}, row {number}: lone surrogate in the text ({error})") from error


def hub_tasks(
    source: str, column: str, hold_out: HoldOut, skip: int, task_bytes: int = TASK_BYTES
) -> Iterator[RowsTask]:
    """Yield the tasks of a data set of the hub, without the first `skip` documents."""
    texts: list[str] = []
    size = 0
    for number, row in enumerate(_stream(source, skip), start=skip):
        text = row.get(column)
        if not isinstance(text, str):
            raise DataError(f"{source}, row {number}: {no_text(row, column)}")
        texts.append(text)
        size += len(text)
        if size >= task_bytes:
            yield RowsTask(source, skip, tuple(texts), size, hold_out)
            texts, size, skip = [], 0, number + 1
    if texts:
        yield RowsTask(source, skip, tuple(texts), size, hold_out)


def _stream(source: str, skip: int) -> Iterator[dict[str, Any]]:
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
        rows: Iterable[Any] = datasets.load_dataset(name, config or None, split=split or "train", streaming=True).skip(
            skip
        )
        yield from rows
    except Exception as error:  # from httpx, fsspec, pyarrow, datasets or whatever else it loads with
        reason = " ".join(str(error).split())
        raise DataError(
            f"{source} cannot be read from the hub ({type(error).__name__}: {reason}); the tokens prepared so far "
            "are kept: run the same command again to continue. Private data sets need HF_TOKEN"
        ) from error
