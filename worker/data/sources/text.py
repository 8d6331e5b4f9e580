"""Text files: each is one document. The same text is held out as when the files are read as bytes."""

from collections.abc import Iterator
from functools import partial
from heapq import merge
from itertools import count
from pathlib import PurePath

from worker.data.sources.contents import Part, is_compressed, length_of, parts
from worker.data.sources.documents import Piece, Task, pieces
from worker.data.sources.files import NamedFiles, held_out_names
from worker.data.sources.rows import Rows
from worker.errors import DataError

LINE_BYTES = 1 << 16  # a longer line may be cut

_Parts = list[tuple[Part, bool]]  # each with whether it is held out


def text_tasks(files: NamedFiles, rows: Rows, task_bytes: int) -> Iterator[Task]:
    """Yield the tasks of text files: several small ones each, or a part of a large one."""
    collected: _Parts = []
    content, size = 0, 0
    for part, held_out in _parts(files, rows.holdout, task_bytes):
        collected.append((part, held_out))
        content, size = content + len(part.content), size + part.size
        if content >= task_bytes:
            yield Task(size, partial(_pieces, collected))
            collected, content, size = [], 0, 0
    if collected:
        yield Task(size, partial(_pieces, collected))


def _pieces(collected: _Parts) -> Iterator[Piece]:
    for part, held_out in collected:
        try:
            yield from pieces(part.content, held_out, begins=part.at == 0, ends=part.ends)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{part.path} is not UTF-8 ({error.reason}, in the lines after byte {part.at}); convert it, for "
                'example with iconv, or set data.tokenizer = "bytes"'
            ) from error


def _parts(files: NamedFiles, holdout: float, task_bytes: int) -> Iterator[tuple[Part, bool]]:
    """Yield the parts of all files, each with whether it is held out. Held out are whole files, chosen by their names
    without .gz or .zst; the end of a single file; everything if the share is 1."""
    names = [PurePath(name).with_suffix("").as_posix() if is_compressed(path) else name for name, path in files]
    several = len(files) > 1 and holdout < 1
    held_out = held_out_names(names, holdout) if several else set()
    for name, (_, path) in zip(names, files, strict=True):
        length = 0 if several else length_of(path)
        border = length - int(length * holdout)
        for part in parts(path, merge(count(task_bytes, task_bytes), [border] if border else []), LINE_BYTES):
            yield part, name in held_out if several else part.at >= border
