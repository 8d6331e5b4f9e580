"""Tokenise tasks in several processes. The results come in the order of the tasks.

Processes rather than threads: the threads of tokenizers share one interpreter, which has to convert every id to a numpy
number serially. A process gets whole tasks and sends back only the ids.
"""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from worker.data.order import Integers
from worker.data.sources.documents import Piece, Task
from worker.data.tokens.index import DtypeName, LeftOut, dtype_for, item_of
from worker.data.tokens.tokenizer import Tokenizer, Tokens
from worker.errors import DataError

_BATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class TokenisedText:
    """Ids of pieces of text, end to end. Piece i begins at `starts[i]`, has `sizes[i]` bytes of text, and begins
    `documents[i]` documents, 0 or 1."""

    ids: Tokens
    starts: Integers
    sizes: Integers
    documents: Integers
    left_out: LeftOut


class TaskTokens(NamedTuple):
    """The text of a task to train on, and its held-out text."""

    training: TokenisedText
    held_out: TokenisedText


Encoder = Callable[[Iterable[Piece]], TaskTokens]  # tokenises the text of a task


class Encoding(Protocol):
    """How text becomes ids. It can be sent to other processes."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that makes the ids."""

    @property
    def dtype(self) -> DtypeName:
        """The dtype of the ids in shards."""

    @property
    def sequence_tokens(self) -> int:
        """No shard ends within so many tokens, counted from its beginning."""

    def identity(self) -> list[Any]:
        """Return values that determine the ids, beside the sources and the tokenizer."""

    def encoder(self) -> Encoder:
        """Return a function that tokenises the text of a task."""


@dataclass(frozen=True)
class DocumentEncoding:
    """Text as documents, end to end, each followed by the tokenizer's end unless it has none."""

    tokenizer: Tokenizer
    sequence_tokens = 1  # any token may begin a shard

    @property
    def dtype(self) -> DtypeName:
        """The smallest that has all ids of the tokenizer."""
        return dtype_for(self.tokenizer.vocabulary)

    def identity(self) -> list[Any]:
        """See `Encoding`."""
        return []

    def encoder(self) -> Encoder:
        """See `Encoding`."""
        encode, end = self.tokenizer.encoder(), self.tokenizer.end
        dtype: npt.DTypeLike = item_of(self.dtype)

        def tokenise(pieces: Iterable[Piece]) -> TaskTokens:
            parts: tuple[list[tuple[Piece, Tokens]], ...] = ([], [])
            for batch in _batches(pieces):
                for piece, ids in zip(batch, encode([each.text for each in batch]), strict=True):
                    ended = np.append(ids, end) if piece.ends and end is not None else ids
                    parts[piece.held_out].append((piece, ended.astype(dtype)))
            return TaskTokens(*map(self._joined, parts))

        return tokenise

    def _joined(self, part: list[tuple[Piece, Tokens]]) -> TokenisedText:
        lengths = np.array([len(ids) for _, ids in part], np.int64)
        return TokenisedText(
            np.concatenate([np.empty(0, item_of(self.dtype)), *(ids for _, ids in part)]),
            starts=np.cumsum(lengths) - lengths,
            sizes=np.array([piece.size for piece, _ in part], np.int64),
            documents=np.array([piece.begins for piece, _ in part], np.int64),
            left_out=LeftOut(),
        )


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Yield lists of pieces, of about _BATCH_BYTES of text."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.size
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    yield batch


def tokenised(
    tasks: Iterable[Task], encoding: Encoding, processes: int
) -> Generator[tuple[int, TaskTokens], None, None]:
    """Yield the size of each task and its result, in order. Raises DataError for the first task that fails."""
    if processes == 1:
        encode = encoding.encoder()
        for task in tasks:
            yield task.size, encode(task.pieces())
        return
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(encoding,)
    )
    try:
        pending: deque[tuple[int, Future[TaskTokens]]] = deque()
        for task in tasks:
            pending.append((task.size, pool.submit(_tokenise_here, task)))
            if len(pending) > 2 * processes:  # keeps every process busy, and few results in memory
                size, result = pending.popleft()
                yield size, result.result()
        for size, result in pending:
            yield size, result.result()
    except BrokenProcessPool as error:
        raise DataError(
            "a tokenising process was killed, possibly because memory ran out; run the same command again"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


# --- in a tokenising process --------------------------------------------------------------------------------------

_here: Encoder


def _begin(encoding: Encoding) -> None:
    global _here
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the process that collects the results
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _here = encoding.encoder()


def _end_with_parent() -> None:
    """End this process when its parent ends. A parent that was killed cannot end it, and it would wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _tokenise_here(task: Task) -> TaskTokens:
    return _here(task.pieces())
