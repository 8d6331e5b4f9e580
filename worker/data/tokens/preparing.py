"""Prepare a token set: tokenise sources of text into shards with an index.

Contents of the directory while it is being prepared:

    train-00000.bin, …    shards; the last one of either part may still be growing
    held-out-00000.bin
    progress.json         completed tasks, finished shards, and the lengths of the growing ones
    tokenizer/            written at the end, together with index.json, which replaces progress.json

After each task its tokens are made durable, and only then recorded in progress.json. When preparing resumes after a
kill, it truncates the growing shards to the recorded lengths and continues with the next task. So the bytes are the
same as those of an uninterrupted run, and only the tasks that were in progress are repeated.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from blake3 import blake3
from pydantic import BaseModel, Field, ValidationError

from outerstep.common.connections import error_text
from outerstep.common.files import NEW, naming, replace_file, try_lock
from protocol.spec.sections import DataSpec
from protocol.validation_errors import explain_all
from worker.data.sources.documents import TASK_BYTES
from worker.data.sources.rows import row_format
from worker.data.sources.source import TextSource, find_source
from worker.data.tokens.conversations import ConversationEncoder, load_chat_template
from worker.data.tokens.index import (
    FILE,
    PROGRESS,
    Conversations,
    DtypeName,
    Index,
    Item,
    Shard,
    check_sizes,
    dtype_for,
    item_of,
    read_index,
    total,
)
from worker.data.tokens.marks import TRAINED
from worker.data.tokens.tokenising import (
    ConversationEncoding,
    DocumentEncoding,
    Encoding,
    LeftOut,
    TaskTokens,
    TokenisedText,
    tokenised,
)
from worker.data.tokens.tokenizer import Tokenizer
from worker.errors import DataError, Stopped

SHARD_TOKENS = 1 << 26
TOKENIZER = "tokenizer"
_CHUNK_BYTES = 1 << 20
_LOCK_POLL_S = 0.5
_ENOUGH_SKIPPED = 1000  # rows, to give up before all have been read
_ELSEWHERE = "choose another directory, or delete this one"
_START_OVER = "delete the directory and start again"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """What a token set is made of. The same recipe makes the same bytes on any machine and any number of cores."""

    sources: Sequence[TextSource]
    tokenizer: Tokenizer
    shard_tokens: int = SHARD_TOKENS
    task_bytes: int = TASK_BYTES
    conversations: ConversationEncoding | None = None  # None: the sources are text

    def digest(self) -> str:
        """Return the identity of the recipe: files by name, size, times and inode, the tokenizer by its content."""
        tokenizer = (self.tokenizer.digest, self.tokenizer.end)
        sources = [source.identity() for source in self.sources]
        parts: list[Any] = [1, sources, tokenizer, self.shard_tokens, self.task_bytes]
        if self.conversations is not None:
            parts.append(self.conversations.identity())
        return blake3(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()

    @property
    def dtype(self) -> DtypeName:
        """The dtype of the ids: of those with marks if they are conversations."""
        return dtype_for(self.tokenizer.vocabulary) if self.conversations is None else "uint32"

    @property
    def encoding(self) -> Encoding:
        """How the sources become ids."""
        return self.conversations or DocumentEncoding(self.tokenizer, item_of(self.dtype))

    @property
    def whole_sequences(self) -> int:
        """Tokens per shard: `shard_tokens`, or a little less so that no sequence of conversations is cut."""
        row = 1 if self.conversations is None else self.conversations.sequence_length + 1
        return max(self.shard_tokens // row, 1) * row


def recipe_of(
    data: DataSpec, tokenizer: Tokenizer, held_out: str | None = None, shard_tokens: int = SHARD_TOKENS
) -> Recipe:
    """Return what the token set of this [data] is made of. `held_out`: a second source, which is held out as a whole;
    nothing of the first one is then. Raises DataError."""
    rows = row_format(data.format, data.column)
    sources = [find_source(data.source, rows, data.holdout if held_out is None else 0.0)]
    if held_out is not None:
        sources.append(find_source(held_out, rows, 1.0))
    conversations = None
    if data.format != "text":
        template = load_chat_template(tokenizer, data.date or datetime.now(UTC).date())
        encoder = ConversationEncoder(tokenizer, template, data.trains_on)
        conversations = ConversationEncoding(encoder, data.sequence_length, data.packing, data.on_error == "skip")
    return Recipe(sources, tokenizer, shard_tokens, conversations=conversations)


class Progress(NamedTuple):
    """Bytes of the sources that are done, their total (None if unknown), and the tokens made so far."""

    done: int
    of: int | None
    tokens: int


class _Written(BaseModel):
    """What is written of a part: its finished shards, and the contents of the shard that is growing."""

    shards: list[Shard] = Field(default_factory=list)
    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    trained: int | None = None
    left_out: LeftOut = Field(default_factory=LeftOut)

    @property
    def all_tokens(self) -> int:
        return total(self.shards) + self.tokens

    @property
    def all_documents(self) -> int:
        return sum(shard.documents or 0 for shard in self.shards) + self.documents


class _State(BaseModel):
    """The content of progress.json."""

    made_from: str
    source: int = 0
    tasks: int = 0  # completed tasks of that source
    rows: int = 0
    size: int = 0  # of all sources
    training: _Written = Field(default_factory=_Written)
    held_out: _Written = Field(default_factory=_Written)

    def completed(self, task: TaskTokens, training: _Written, held_out: _Written) -> None:
        """Record a completed task."""
        self.tasks, self.rows, self.size = self.tasks + 1, self.rows + task.rows, self.size + task.size
        self.training, self.held_out = training, held_out


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(
    recipe: Recipe,
    out: Path,
    *,
    processes: int | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
    stop: threading.Event | None = None,
) -> Index:
    """Prepare the token set in `out`, or continue preparing it, and return its index; at once, if it is complete.

    `report` is called after each task. If another process is preparing `out`: raises DataError without `stop`; with
    `stop`, waits for it, and raises Stopped once `stop` is set. Raises DataError if anything cannot be read or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out, stop):
            return _prepare(recipe, out, processes or cores(), report, stop)
    except OSError as error:
        raise DataError(
            f"preparing {out} failed: {error_text(error)}; run the same command again to continue"
        ) from error


def _prepare(
    recipe: Recipe, out: Path, processes: int, report: Callable[[Progress], None], stop: threading.Event | None
) -> Index:
    made_from = recipe.digest()
    if (out / FILE).exists():
        index = read_index(out / FILE)
        if index.made_from != made_from:
            raise DataError(
                f"{out} contains another token set, or one of files that have changed since, made from "
                f"{index.source}; {_ELSEWHERE}"
            )
        check_sizes(index.shards, index.item, out)
        (out / PROGRESS).unlink(missing_ok=True)  # left by a process that was killed before it could delete it
        return index
    item, marked = item_of(recipe.dtype), recipe.conversations is not None
    state = _read_state(out, made_from, item)
    training, held_out = (
        _ShardWriter(out, prefix, item, recipe.whole_sequences, written, marked=marked)
        for prefix, written in (("train", state.training), ("held-out", state.held_out))
    )
    sizes = [source.size for source in recipe.sources]
    of = None if None in sizes else sum(size or 0 for size in sizes)
    try:
        with closing(_tokenised(recipe, state, processes)) as tasks:  # closing ends the processes
            for task in tasks:
                training.add(task.training)
                held_out.add(task.held_out)
                training.sync()
                held_out.sync()
                state.completed(task, training.written, held_out.written)
                _write(out / PROGRESS, state.model_dump_json())
                if state.training.left_out.skipped + state.held_out.left_out.skipped >= _ENOUGH_SKIPPED:
                    _check_usable(_names(recipe), training.written, held_out.written)
                report(Progress(state.size, of, training.written.all_tokens + held_out.written.all_tokens))
                if stop is not None and stop.is_set():
                    raise Stopped("stopped while preparing the training set")
        training.finish_shard()
        held_out.finish_shard()
    finally:
        training.close()
        held_out.close()
    return _finish(recipe, out, made_from, training.written, held_out.written)


def _tokenised(recipe: Recipe, state: _State, processes: int) -> Generator[TaskTokens, None, None]:
    """Yield the tokens of the remaining tasks, source by source."""
    while state.source < len(recipe.sources):
        tasks = recipe.sources[state.source].tasks(state.tasks, state.rows, recipe.task_bytes)
        yield from tokenised(tasks, recipe.encoding, processes)
        state.source, state.tasks, state.rows = state.source + 1, 0, 0


def _names(recipe: Recipe) -> str:
    return ", ".join(source.name for source in recipe.sources)


def _check_usable(names: str, *parts: _Written) -> None:
    """Raise DataError if more than half of the rows had to be skipped."""
    skipped = sum(part.left_out.skipped for part in parts)
    used = sum(part.all_documents + sum(part.left_out.dropped.values()) for part in parts)
    if skipped > used:
        first = next(fault for part in parts for fault in part.left_out.faults)
        raise DataError(f"{names}: {skipped} of {skipped + used} rows cannot be used; the first is {first}")


def _finish(recipe: Recipe, out: Path, made_from: str, training: _Written, held_out: _Written) -> Index:
    names, left_out = _names(recipe), training.left_out + held_out.left_out
    _check_usable(names, training, held_out)
    if not training.shards:
        dropped = "".join(f"; {count} conversations have {reason}" for reason, count in left_out.dropped.items())
        raise DataError(f"{names} has no text to train on{dropped}; add text, or hold out less")
    tokenizer, conversations = recipe.tokenizer, None
    if (given := recipe.conversations) is not None:
        conversations = Conversations(
            sequence_length=given.sequence_length,
            train_on=given.conversations.train_on,
            packing=given.packing,
            **asdict(left_out),
        )
    index = Index(
        format=1 if conversations is None else 2,
        dtype=recipe.dtype,
        vocabulary=tokenizer.vocabulary,
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer.digest,
        end=tokenizer.end,
        source=names,
        made_from=made_from,
        training=training.shards,
        held_out=held_out.shards,
        conversations=conversations,
    )
    tokenizer.save(out / TOKENIZER)
    _write(out / FILE, index.text())
    (out / PROGRESS).unlink(missing_ok=True)
    return index


def _read_state(out: Path, made_from: str, item: Item) -> _State:
    """Return the state of the directory. Raises DataError if it contains anything else."""
    try:
        state = _State.model_validate_json((out / PROGRESS).read_bytes())
    except FileNotFoundError:
        if any(path.name != f"{PROGRESS}{NEW}" for path in out.iterdir()):
            raise DataError(f"{out} is not empty and not a token set; {_ELSEWHERE}") from None
        state = _State(made_from=made_from)
        _write(out / PROGRESS, state.model_dump_json())  # before any shard, so that the directory can be recognised
        return state
    except ValidationError as error:
        raise DataError(
            f"{out / PROGRESS} cannot be read: {explain_all(error.errors(), most=3)}; {_START_OVER}"
        ) from error
    if state.made_from != made_from:
        raise DataError(
            f"{out} contains an unfinished token set of other text, or of files that have changed since, or with "
            f"another tokenizer or other options; {_ELSEWHERE}"
        )
    check_sizes(state.training.shards + state.held_out.shards, item, out)
    return state


def _write(path: Path, text: str) -> None:
    replace_file(path, lambda file: file.write(text.encode()))


@contextmanager
def _locked(out: Path, stop: threading.Event | None) -> Iterator[None]:
    """Hold the lock of the directory. The system releases it when the process ends."""
    descriptor = os.open(out, os.O_RDONLY)
    try:
        if not try_lock(descriptor):
            if stop is None:
                raise DataError(f"another process is preparing {out}; wait for it, or choose another directory")
            log.info("another process is preparing %s; waiting for it", out)
            while not try_lock(descriptor):
                if stop.wait(_LOCK_POLL_S):
                    raise Stopped("stopped while another process prepared the training set")
        yield
    finally:
        os.close(descriptor)


class _ShardWriter:
    """Writes one part of a set, continuing after `written`, in shards of `shard_tokens`: PREFIX-00000.bin and so on.
    `marked`: the ids have marks."""

    def __init__(
        self, directory: Path, prefix: str, item: Item, shard_tokens: int, written: _Written, *, marked: bool
    ) -> None:
        self._directory, self._prefix, self._item, self._shard_tokens = directory, prefix, item, shard_tokens
        self.written, self._marked = written, marked
        self._hasher = blake3()
        self._file: BinaryIO | None = None
        if written.tokens:
            self._resume()

    def add(self, text: TokenisedText) -> None:
        """Append the ids. Each piece of text counts for the shard that it begins in."""
        at, ids = 0, text.ids.astype(self._item, copy=False)
        while at < len(ids):
            stop = min(len(ids), at + self._shard_tokens - self.written.tokens)
            self._append(ids[at:stop].tobytes())
            if self._marked:
                trained = int(np.count_nonzero(ids[at:stop].astype(np.uint32) & np.uint32(TRAINED)))
                self.written.trained = (self.written.trained or 0) + trained
            first, last = np.searchsorted(text.starts, (at, stop))
            if stop == len(ids):
                last = len(text.starts)
            self.written.tokens += stop - at
            self.written.documents += int(text.begins[first:last].sum())
            self.written.bytes += int(text.sizes[first:last].sum())
            if self.written.tokens == self._shard_tokens:
                self.finish_shard()
            at = stop
        self.written.left_out += text.left_out

    def sync(self) -> None:
        """Make the appended ids durable."""
        if self._file is not None:
            with naming(Path(self._file.name)):
                self._file.flush()
                os.fsync(self._file.fileno())

    def finish_shard(self) -> None:
        """Finish the growing shard, if there is one."""
        if self._file is None:
            return
        self.sync()
        self._file.close()
        self._file, written = None, self.written
        shard = Shard(
            file=self._name,
            tokens=written.tokens,
            digest=self._hasher.hexdigest(),
            documents=written.documents,
            bytes=written.bytes,
            trained=written.trained,
        )
        self.written, self._hasher = _Written(shards=[*written.shards, shard], left_out=written.left_out), blake3()

    def close(self) -> None:
        """Close the growing shard's file without finishing the shard."""
        if self._file is not None:
            self._file.close()

    @property
    def _name(self) -> str:
        return f"{self._prefix}-{len(self.written.shards):05}.bin"

    def _append(self, content: bytes) -> None:
        if self._file is None:
            self._file = (self._directory / self._name).open("wb")
        with naming(Path(self._file.name)):
            self._file.write(content)
        self._hasher.update(content)

    def _resume(self) -> None:
        """Truncate the growing shard to its recorded length, and hash it again."""
        path, left = self._directory / self._name, self.written.tokens * self._item.itemsize
        try:
            self._file = path.open("r+b")
        except OSError as error:
            raise DataError(f"{path} is missing ({error.strerror}); {_START_OVER}") from error
        while left and (chunk := self._file.read(min(left, _CHUNK_BYTES))):
            self._hasher.update(chunk)
            left -= len(chunk)
        if left:
            self._file.close()
            raise DataError(f"{path} is {left} bytes shorter than recorded in {PROGRESS}; {_START_OVER}")
        self._file.truncate()
