"""Tokenise tasks in several processes. The results come in the order of the tasks.

Processes rather than threads: the threads of tokenizers share one interpreter, which has to convert every id to a numpy
number serially. Each process reads its own tasks and sends back only the ids.
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

from worker.data.sources.documents import Piece, Task
from worker.data.tokens.tokenizer import Ids, Tokenizer, Tokens
from worker.errors import DataError

_BATCH_BYTES = 1 << 20

Encoder = Callable[[Sequence[str]], list[Ids]]


@dataclass(frozen=True)
class TokenisedText:
    """Ids of pieces of text, end to end. Piece i begins at `starts[i]` and has `sizes[i]` bytes of text."""

    ids: Tokens
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    begins: npt.NDArray[np.bool_]  # whether a document begins with the piece


@dataclass(frozen=True)
class TaskTokens:
    """The result of a task: its text to train on, and its held-out text. `size` and `rows` are those of the task."""

    size: int
    rows: int
    training: TokenisedText
    held_out: TokenisedText


def tokenised(
    tasks: Iterable[Task], tokenizer: Tokenizer, dtype: npt.DTypeLike, processes: int
) -> Iterator[TaskTokens]:
    """Yield the result of each task, in order. Raises DataError for the first task in that order that fails."""
    if processes == 1:
        encode = tokenizer.encoder()
        for task in tasks:
            yield tokenise(task, encode, tokenizer.end, dtype)
        return
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(tokenizer, dtype)
    )
    try:
        pending: deque[Future[TaskTokens]] = deque()
        for task in tasks:
            pending.append(pool.submit(_tokenise_here, task))
            if len(pending) > 2 * processes:  # keeps every process busy, and few results in memory
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a tokenising process was killed, possibly because memory ran out; run the same command again to continue"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def tokenise(task: Task, encode: Encoder, end: int | None, dtype: npt.DTypeLike) -> TaskTokens:
    """Return the ids of a task. Each document is followed by the id `end`, unless that is None."""
    parts = (_IdCollector(end, dtype), _IdCollector(end, dtype))
    batch: list[Piece] = []
    size = 0
    for piece in task.pieces():
        batch.append(piece)
        size += piece.size
        if size >= _BATCH_BYTES:
            _encode(batch, encode, parts)
            batch, size = [], 0
    _encode(batch, encode, parts)
    return TaskTokens(task.size, task.rows, parts[False].text(), parts[True].text())


def _encode(batch: Sequence[Piece], encode: Encoder, parts: "tuple[_IdCollector, _IdCollector]") -> None:
    for piece, ids in zip(batch, encode([piece.text for piece in batch]), strict=True):
        parts[piece.held_out].add(piece, ids)


class _IdCollector:
    """Collects the training or the held-out ids of a task."""

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

    def text(self) -> TokenisedText:
        ids: Tokens = np.concatenate([np.empty(0, self._dtype), *self._ids])
        return TokenisedText(
            ids, np.array(self._starts, np.int64), np.array(self._sizes, np.int64), np.array(self._begins, bool)
        )


# --- in a tokenising process --------------------------------------------------------------------------------------

_here: Callable[[Task], TaskTokens]


def _begin(tokenizer: Tokenizer, dtype: npt.DTypeLike) -> None:
    global _here
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the process that collects the results
    threading.Thread(target=_end_with_parent, daemon=True).start()
    encode = tokenizer.encoder()
    _here = lambda task: tokenise(task, encode, tokenizer.end, dtype)  # noqa: E731


def _end_with_parent() -> None:
    """End this process when its parent ends. A parent that was killed cannot end it, and it would wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _tokenise_here(task: Task) -> TaskTokens:
    return _here(task)
