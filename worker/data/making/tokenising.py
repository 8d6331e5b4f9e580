"""Tasks of text become token ids, in several processes; the results come in the order of the tasks.

Processes and not threads: tokenizers' own threads share one interpreter, which has to turn every id into a number of
numpy's, one after the other. Each process reads its own task and sends back the ids alone.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.data.ids import Integers, Tokens
from worker.data.sources.pieces import Piece, Task
from worker.data.tokens.tokenizer import Ids, Tokenizer
from worker.errors import DataError

_BATCH_BYTES = 1 << 20

Encoder = Callable[[Sequence[str]], list[Ids]]


@dataclass(frozen=True)
class Text:
    """Ids of pieces of text, put end to end; piece i begins at `starts[i]` and is of `sizes[i]` bytes of text."""

    ids: Tokens
    starts: Integers
    sizes: Integers
    begins: npt.NDArray[np.bool_]  # whether a document does, with the piece


@dataclass(frozen=True)
class Result:
    """What became of a task: the text to train on and that to hold out."""

    size: int
    rows: int
    training: Text
    held_out: Text


def tokenised(tasks: Iterable[Task], tokenizer: Tokenizer, dtype: npt.DTypeLike, processes: int) -> Iterator[Result]:
    """Yield the results of the tasks, in their order. Raises DataError, the first one by that order."""
    if processes == 1:
        encode = tokenizer.encoder()
        for task in tasks:
            yield tokenise(task, encode, tokenizer.end, dtype)
        return
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(tokenizer, dtype)
    )
    try:
        waiting: deque[Future[Result]] = deque()
        for task in tasks:
            waiting.append(pool.submit(_tokenise_here, task))
            if len(waiting) > 2 * processes:  # so that nobody waits for a task, and few results for their turn
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenises has ended before its time, as for want of memory; the same command goes on where "
            "this one was"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def tokenise(task: Task, encode: Encoder, end: int | None, dtype: npt.DTypeLike) -> Result:
    """Return the ids of a task. Documents are followed by `end`, if there is such an id."""
    parts = (_Part(end, dtype), _Part(end, dtype))
    batch: list[Piece] = []
    size = 0
    for piece in task.pieces():
        batch.append(piece)
        size += piece.size
        if size >= _BATCH_BYTES:
            _encode(batch, encode, parts)
            batch, size = [], 0
    _encode(batch, encode, parts)
    return Result(task.size, task.rows, parts[False].text(), parts[True].text())


def _encode(batch: Sequence[Piece], encode: Encoder, parts: "tuple[_Part, _Part]") -> None:
    for piece, ids in zip(batch, encode([piece.text for piece in batch]), strict=True):
        parts[piece.held_out].add(piece, ids)


class _Part:
    """The training or held-out text of a task, as it grows."""

    def __init__(self, end: int | None, dtype: npt.DTypeLike) -> None:
        self._dtype = dtype
        self._end = None if end is None else np.array([end], dtype)
        self._ids: list[Tokens] = []
        self._starts: list[int] = []
        self._sizes: list[int] = []
        self._begins: list[bool] = []
        self._length = 0

    def add(self, piece: Piece, ids: Ids) -> None:
        self._starts.append(self._length)
        self._sizes.append(piece.size)
        self._begins.append(piece.begins)
        self._append(ids.astype(self._dtype))
        if piece.ends and self._end is not None:
            self._append(self._end)

    def _append(self, ids: Tokens) -> None:
        self._ids.append(ids)
        self._length += len(ids)

    def text(self) -> Text:
        ids: Tokens = np.concatenate([np.empty(0, self._dtype), *self._ids])
        return Text(
            ids, np.array(self._starts, np.int64), np.array(self._sizes, np.int64), np.array(self._begins, bool)
        )


# --- in a process of its own --------------------------------------------------------------------------------------

_here: Callable[[Task], Result]


def _begin(tokenizer: Tokenizer, dtype: npt.DTypeLike) -> None:
    global _here
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever waits for the results
    threading.Thread(target=_end_with_parent, daemon=True).start()
    encode = tokenizer.encoder()
    _here = lambda task: tokenise(task, encode, tokenizer.end, dtype)  # noqa: E731


def _end_with_parent() -> None:
    """End this process when the one that started it has: killed, it could not say so, and this one waited for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _tokenise_here(task: Task) -> Result:
    return _here(task)
