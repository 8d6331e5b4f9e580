"""Text files: each is one document. The same text is held out as when the files are read as bytes."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import count
from pathlib import PurePath

from worker.data.sources.contents import Part, is_compressed, length_of, parts
from worker.data.sources.documents import TASK_BYTES, Piece, pieces
from worker.data.sources.files import NamedFiles, held_out_names
from worker.errors import DataError

LINE_BYTES = 1 << 16  # a longer line may be cut


@dataclass(frozen=True)
class TextTask:
    """Several small files, or a part of a large one; each with whether it is held out."""

    parts: tuple[tuple[Part, bool], ...]

    @property
    def size(self) -> int:
        return sum(part.size for part, _ in self.parts)

    def pieces(self) -> Iterator[Piece]:
        for part, held_out in self.parts:
            try:
                yield from pieces(part.content, held_out, begins=part.at == 0, ends=part.ends)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{part.path} is not UTF-8 ({error.reason}, in the lines after byte {part.at}); convert it, for "
                    'example with iconv, or set data.tokenizer = "bytes"'
                ) from error


def text_tasks(files: NamedFiles, holdout: float, task_bytes: int = TASK_BYTES) -> Iterator[TextTask]:
    """Yield the tasks of text files."""
    collected: list[tuple[Part, bool]] = []
    size = 0
    for part, held_out in _parts(files, holdout, task_bytes):
        collected.append((part, held_out))
        size += len(part.content)
        if size >= task_bytes:
            yield TextTask(tuple(collected))
            collected, size = [], 0
    if collected:
        yield TextTask(tuple(collected))


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
