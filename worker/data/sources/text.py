"""Plain text files: each is one document. The same text is held out as when the files are read as bytes."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from worker.data.sources.documents import TASK_BYTES, Piece, line_start, pieces
from worker.data.sources.files import NamedFiles, changed, held_out_names
from worker.errors import DataError

LINE_BYTES = 1 << 16  # a longer line may be cut


@dataclass(frozen=True)
class _Range:
    """The lines of a file of `length` bytes that begin in the bytes [start, stop)."""

    path: Path
    start: int
    stop: int
    length: int
    held_out: bool


@dataclass(frozen=True)
class TextTask:
    """Several small files, or a part of a large one."""

    ranges: tuple[_Range, ...]

    @property
    def size(self) -> int:
        return sum(each.stop - each.start for each in self.ranges)

    def pieces(self) -> Iterator[Piece]:
        for each in self.ranges:
            with each.path.open("rb") as file:
                start, stop = (line_start(file, at, each.length, most=LINE_BYTES) for at in (each.start, each.stop))
                file.seek(start)
                content = file.read(stop - start)
                if len(content) < stop - start or (stop == each.length and file.read(1)):
                    raise changed(each.path)
            try:
                yield from pieces(content, each.held_out, begins=start == 0, ends=stop == each.length)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{each.path} is not UTF-8 ({error.reason}, in the lines after byte {start}); convert it, for "
                    'example with iconv, or set data.tokenizer = "bytes"'
                ) from error


def text_tasks(files: NamedFiles, holdout: float, task_bytes: int = TASK_BYTES) -> Iterator[TextTask]:
    """Yield the tasks of text files. Held out are whole files, chosen by name; the end of a single file; everything if
    the share is 1."""
    several = len(files) > 1 and holdout < 1
    held_out = held_out_names((name for name, _ in files), holdout) if several else set()
    ranges: list[_Range] = []
    size = 0
    for name, path in files:
        length = path.stat().st_size
        border = length if several else length - int(length * holdout)
        cuts = sorted({*range(0, length, task_bytes), border, length})
        for start, stop in pairwise(cuts):
            if ranges and size + stop - start > task_bytes:
                yield TextTask(tuple(ranges))
                ranges, size = [], 0
            ranges.append(_Range(path, start, stop, length, name in held_out or start >= border))
            size += stop - start
    if ranges:
        yield TextTask(tuple(ranges))
