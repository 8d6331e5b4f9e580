"""Tokenise tasks in several processes. The results come in the order of the tasks.

Processes rather than threads: the threads of tokenizers share one interpreter, which has to convert every id to a numpy
number serially. A process gets whole tasks and sends back only the ids.
"""

import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from worker.data.sources.documents import Piece, Task
from worker.data.tokens.conversations import ConversationEncoder
from worker.data.tokens.marks import BEGINS, TRAINED
from worker.data.tokens.packing import pack
from worker.data.tokens.rendering import BadConversation
from worker.data.tokens.tokenizer import Ids, Tokenizer, Tokens
from worker.errors import DataError

_BATCH_BYTES = 1 << 20
_SHOWN = 5  # rows that are skipped, by file and line
_SHOWN_CHARACTERS = 500


def _sum(counts: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted((Counter(counts) + Counter(others)).items()))


@dataclass(frozen=True)
class LeftOut:
    """What a set of conversations leaves out.

    truncated   conversations that are too long for a sequence
    dropped     conversations without anything to train on, by reason
    longest     tokens of the longest conversation before it was truncated
    ignored     answers that are not trained on, by reason
    skipped     rows that are no conversation, or that the chat template rejects
    faults      what is wrong with the first of them
    split       conversations that became several, each an answer's own
    repeated    tokens that these repeat
    """

    truncated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    longest: int = 0
    ignored: dict[str, int] = field(default_factory=dict)
    skipped: int = 0
    faults: tuple[str, ...] = ()
    split: int = 0
    repeated: int = 0

    def __add__(self, other: "LeftOut") -> "LeftOut":
        return LeftOut(
            self.truncated + other.truncated,
            _sum(self.dropped, other.dropped),
            max(self.longest, other.longest),
            _sum(self.ignored, other.ignored),
            self.skipped + other.skipped,
            (*self.faults, *other.faults)[:_SHOWN],
            self.split + other.split,
            self.repeated + other.repeated,
        )


@dataclass(frozen=True)
class TokenisedText:
    """Ids of pieces of text, end to end. Piece i begins at `starts[i]` and has `sizes[i]` bytes of text."""

    ids: Tokens
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    begins: npt.NDArray[np.bool_]  # whether a document begins with the piece
    left_out: LeftOut = LeftOut()


# Tokenises the text of a task. Returns the ids to train on and the held-out ones.
Encoder = Callable[[Iterable[Piece]], tuple[TokenisedText, TokenisedText]]


class Encoding(Protocol):
    """How text becomes ids. It can be sent to other processes."""

    def encoder(self) -> Encoder:
        """Return a function that tokenises the text of a task."""


@dataclass(frozen=True)
class DocumentEncoding:
    """Text as documents of ids of this dtype, end to end."""

    tokenizer: Tokenizer
    dtype: npt.DTypeLike

    def encoder(self) -> Encoder:
        encode = self.tokenizer.encoder()

        def tokenise(pieces: Iterable[Piece]) -> tuple[TokenisedText, TokenisedText]:
            training, held_out = (_Documents(self.tokenizer.end, self.dtype) for _ in range(2))
            for batch in _batches(pieces):
                for piece, ids in zip(batch, encode([each.text for each in batch]), strict=True):
                    (held_out if piece.held_out else training).add(piece, ids)
            return training.text(), held_out.text()

        return tokenise


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


@dataclass(frozen=True)
class ConversationEncoding:
    """Conversations as sequences of `sequence_length` tokens; see worker/data/tokens/conversations.py. `skip`: leave
    out and count those that cannot be used, instead of raising DataError."""

    conversations: ConversationEncoder
    sequence_length: int
    packing: bool
    skip: bool = True

    def identity(self) -> list[Any]:
        """Return values that determine the ids, beside the sources and the tokenizer."""
        return [*self.conversations.identity(), self.sequence_length, self.packing, self.skip]

    def encoder(self) -> Encoder:
        encode, tokenizer = self.conversations.encoder(), self.conversations.tokenizer
        pad = next(each for each in (tokenizer.pad, tokenizer.end, 0) if each is not None)

        def tokenise(pieces: Iterable[Piece]) -> tuple[TokenisedText, TokenisedText]:
            training, held_out = (_Sequences(self.sequence_length, pad, packing=self.packing) for _ in range(2))
            for piece in pieces:
                part, ignored = held_out if piece.held_out else training, Counter[str]()
                try:
                    if piece.fault is not None:
                        raise BadConversation(piece.fault)
                    (ids,) = encode([piece.text], ignored)
                except BadConversation as error:
                    fault = f"{piece.where()}: {error}"
                    if not self.skip:
                        raise DataError(fault) from error
                    part.skip(fault)
                else:
                    part.add(piece, ids, ignored)
            return training.text(), held_out.text()

        return tokenise


@dataclass(frozen=True)
class TaskTokens:
    """The result of a task: its text to train on, and its held-out text. `size` is that of the task."""

    size: int
    training: TokenisedText
    held_out: TokenisedText


def tokenised(tasks: Iterable[Task], encoding: Encoding, processes: int) -> Generator[TaskTokens, None, None]:
    """Yield the result of each task, in order. Raises DataError for the first task in that order that fails."""
    if processes == 1:
        encode = encoding.encoder()
        for task in tasks:
            yield TaskTokens(task.size, *encode(task.pieces()))
        return
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(encoding,)
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
            "a tokenising process was killed, possibly because memory ran out; run the same command again"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class _Documents:
    """Collects documents end to end, each followed by the id `end`, unless that is None."""

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


class _Sequences:
    """Collects conversations in sequences of `length` tokens and the one after them, the last target: several in one if
    `packing`, otherwise one. The rest of a sequence is filled with the id `pad`."""

    def __init__(self, length: int, pad: int, *, packing: bool) -> None:
        self._row, self._pad, self._packing = length + 1, pad, packing
        self._conversations: list[Ids] = []
        self._sizes: list[int] = []
        self._begins: list[bool] = []
        self._left_out = LeftOut()

    def skip(self, fault: str) -> None:
        """Count a row that cannot be used."""
        self._left_out += LeftOut(skipped=1, faults=(fault[:_SHOWN_CHARACTERS],))

    def add(self, piece: Piece, ids: Ids, ignored: Mapping[str, int]) -> None:
        """Add a conversation, which may have several parts. `ignored`: answers that are not trained on, by reason."""
        parts = np.split(ids, np.flatnonzero(ids & np.uint32(BEGINS))[1:])
        kept = [each[: self._row] for each in parts]
        trained = [bool((each & np.uint32(TRAINED)).any()) for each in kept]
        beyond = f"nothing to train on in the first {self._row} tokens"
        dropped = {} if any(trained) else {beyond if (ids & np.uint32(TRAINED)).any() else "nothing to train on": 1}
        self._left_out += LeftOut(
            int(any(t and len(part) > self._row for t, part in zip(trained, parts, strict=True))),
            dropped,
            max(map(len, parts)),
            dict(ignored) | ({beyond: len(parts) - sum(trained)} if any(trained) and not all(trained) else {}),
            split=int(len(parts) > 1),
            repeated=len(ids) - max(map(len, parts)),
        )
        used = [part for part, is_trained in zip(kept, trained, strict=True) if is_trained]
        self._conversations += used
        self._begins += [n == 0 for n in range(len(used))]
        self._sizes += [piece.size if n == 0 else 0 for n in range(len(used))]

    def text(self) -> TokenisedText:
        lengths = [len(ids) for ids in self._conversations]
        sequences = pack(lengths, self._row) if self._packing else [[i] for i in range(len(lengths))]
        ids = np.full((len(sequences), self._row), self._pad, np.uint32)
        starts, order = [], []
        for row, members in enumerate(sequences):
            at = 0
            for i in members:
                ids[row, at : at + lengths[i]] = self._conversations[i]
                starts.append(row * self._row + at)
                order.append(i)
                at += lengths[i]
        sizes = np.array([self._sizes[i] for i in order], np.int64)
        begins = np.array([self._begins[i] for i in order], bool)
        return TokenisedText(ids.reshape(-1), np.array(starts, np.int64), sizes, begins, self._left_out)


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
    return TaskTokens(task.size, *_here(task.pieces()))
