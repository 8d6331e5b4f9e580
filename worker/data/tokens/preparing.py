"""Prepare a token set: tokenise sources of text into shards with an index.

Contents of the directory while it is being prepared:

    .unfinished-token-set   an empty file, which is deleted when the set is complete
    train-00000.bin, …      shards
    held-out-00000.bin
    tokenizer/              written at the end, and after it index.json

A preparation that was killed starts again from the beginning.
"""

import json
import logging
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from blake3 import blake3

from outerstep.common.connections import error_text
from outerstep.common.files import fsync, naming, replace_file, try_lock
from protocol.spec.sections import DataSpec
from worker.data.sources.documents import TASK_BYTES
from worker.data.sources.rows import Rows
from worker.data.sources.source import Source, find_source
from worker.data.tokens.conversations import load_chat_template
from worker.data.tokens.encoding import ConversationEncoding, DocumentEncoding, Encoding, TokenisedText
from worker.data.tokens.index import FILE, UNFINISHED, Conversations, Index, LeftOut, Shard, complete_index, item_of
from worker.data.tokens.marks import TRAINED
from worker.data.tokens.tokenising import tokenised
from worker.data.tokens.tokenizer import Tokenizer
from worker.errors import DataError, Stopped

SHARD_TOKENS = 1 << 26
TOKENIZER = "tokenizer"
_LOCK_POLL_S = 0.5
_ENOUGH_SKIPPED = 1000  # rows, to give up before all have been read
_ELSEWHERE = "choose another directory, or delete this one"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """What a token set is made of. The same recipe makes the same bytes on any machine and any number of cores."""

    sources: Sequence[Source]
    encoding: Encoding
    shard_tokens: int = SHARD_TOKENS
    task_bytes: int = TASK_BYTES

    def digest(self) -> str:
        """Return the identity of the recipe: files by name, size, times and inode, the tokenizer by its content."""
        tokenizer = self.encoding.tokenizer
        sources = [source.identity() for source in self.sources]
        parts: list[Any] = [1, sources, tokenizer.digest, tokenizer.end, self.shard_tokens, self.task_bytes]
        parts.append(self.encoding.identity())
        return blake3(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()

    @property
    def name(self) -> str:
        """The sources' names."""
        return ", ".join(source.name for source in self.sources)


def recipe_of(
    data: DataSpec, tokenizer: Tokenizer, held_out: str | None = None, shard_tokens: int = SHARD_TOKENS
) -> Recipe:
    """Return what the token set of this [data] is made of. `held_out`: a second source, which is held out as a whole;
    nothing of the first one is then. Raises DataError."""
    sources = [find_source(data.source, Rows(data.holdout if held_out is None else 0.0, data.format, data.column))]
    if held_out is not None:
        sources.append(find_source(held_out, Rows(1.0, data.format, data.column)))
    return Recipe(sources, encoding_of(data, tokenizer), shard_tokens)


def encoding_of(data: DataSpec, tokenizer: Tokenizer) -> Encoding:
    """Return how the sources of this [data] become ids. Raises DataError."""
    if data.format == "text":
        return DocumentEncoding(tokenizer)
    template = load_chat_template(tokenizer, data.date or datetime.now(UTC).date())
    skip = data.on_error == "skip"
    return ConversationEncoding(tokenizer, template, data.trains_on, data.sequence_length, data.packing, skip)


class Progress(NamedTuple):
    """Bytes of the sources that are done, their total (None if unknown), and the tokens made so far."""

    done: int
    of: int | None
    tokens: int


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
    """Prepare the token set in `out` and return its index; at once, if it is there.

    `report` is called after each task. If another process is preparing `out`: raises DataError without `stop`; with
    `stop`, waits for it. Raises Stopped once `stop` is set, and DataError if anything cannot be read or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _locked(out, stop):
            if (out / FILE).exists():
                return _prepared(recipe, out)
            with _unfinished(out):
                return _prepare(recipe, out, processes or cores(), report, stop)
    except OSError as error:
        raise DataError(f"preparing {out} failed: {error_text(error)}; run the same command again") from error


def _prepared(recipe: Recipe, out: Path) -> Index:
    """Return the index of the set in `out`. Raises DataError if it is not that of the recipe."""
    index = complete_index(out)
    if index.made_from != recipe.digest():
        raise DataError(
            f"{out} contains another token set, or one of files that have changed since, made from {index.source}; "
            f"{_ELSEWHERE}"
        )
    (out / UNFINISHED).unlink(missing_ok=True)  # left by a process that was killed before it could delete it
    return index


def _prepare(
    recipe: Recipe, out: Path, processes: int, report: Callable[[Progress], None], stop: threading.Event | None
) -> Index:
    made_from = recipe.digest()  # before the files are read
    training, held_out = (_Part(recipe, out, prefix) for prefix in ("train", "held-out"))
    sizes = [source.size for source in recipe.sources]
    of = None if None in sizes else sum(size or 0 for size in sizes)
    tasks = chain.from_iterable(source.tasks(recipe.task_bytes) for source in recipe.sources)
    done = 0
    with closing(training), closing(held_out), closing(tokenised(tasks, recipe.encoding, processes)) as results:
        for size, texts in results:
            for part, text in zip((training, held_out), texts, strict=True):
                part.add(text)
            if training.left_out.skipped + held_out.left_out.skipped >= _ENOUGH_SKIPPED:
                _check_usable(recipe, training, held_out)
            done += size
            report(Progress(done, of, training.tokens + held_out.tokens))
            if stop is not None and stop.is_set():
                raise Stopped("stopped while preparing the training set")
        training.finish_shard()
        held_out.finish_shard()
    _check_usable(recipe, training, held_out)
    index = _index(recipe, made_from, training, held_out)
    recipe.encoding.tokenizer.save(out / TOKENIZER)
    replace_file(out / FILE, lambda file: file.write(index.text().encode()))
    return index


def _check_usable(recipe: Recipe, *parts: "_Part") -> None:
    """Raise DataError if more than half of the rows had to be skipped."""
    left_out = [part.left_out for part in parts]
    skipped = sum(each.skipped for each in left_out)
    used = sum(part.documents for part in parts) + sum(sum(each.dropped.values()) for each in left_out)
    if skipped > used:
        first = next(fault for each in left_out for fault in each.faults)
        raise DataError(f"{recipe.name}: {skipped} of {skipped + used} rows cannot be used; the first is {first}")


def _index(recipe: Recipe, made_from: str, training: "_Part", held_out: "_Part") -> Index:
    left_out = training.left_out + held_out.left_out
    if not training.shards:
        dropped = "".join(f"; {count} conversations have {reason}" for reason, count in left_out.dropped.items())
        raise DataError(f"{recipe.name} has no text to train on{dropped}; add text, or hold out less")
    encoding, conversations = recipe.encoding, None
    if isinstance(encoding, ConversationEncoding):
        conversations = Conversations(
            sequence_length=encoding.sequence_length,
            train_on=encoding.train_on,
            packing=encoding.packing,
            **dict(left_out),
        )
    tokenizer = encoding.tokenizer
    return Index(
        format=1 if conversations is None else 2,
        dtype=encoding.dtype,
        vocabulary=tokenizer.vocabulary,
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer.digest,
        end=tokenizer.end,
        source=recipe.name,
        made_from=made_from,
        training=training.shards,
        held_out=held_out.shards,
        conversations=conversations,
    )


@contextmanager
def _unfinished(out: Path) -> Iterator[None]:
    """Mark the directory as an unfinished set during the block. What a killed process has left in it is deleted first,
    and what the block has written if it raises. Raises DataError if there is anything else."""
    mark = out / UNFINISHED
    if not mark.exists() and any(out.iterdir()):
        raise DataError(f"{out} is not empty and not a token set; {_ELSEWHERE}")
    mark.touch()
    fsync(out)  # before any shard, so that the directory can be recognised
    _delete_shards(out)
    try:
        yield
    except BaseException:
        _delete_shards(out)
        raise
    finally:
        mark.unlink()


def _delete_shards(out: Path) -> None:
    for path in out.glob("*.bin"):
        path.unlink()
    shutil.rmtree(out / TOKENIZER, ignore_errors=True)


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


class _Part:
    """One part of a set, written in shards: PREFIX-00000.bin and so on. It has the tokens, documents and rows left out
    of all that was added."""

    def __init__(self, recipe: Recipe, directory: Path, prefix: str) -> None:
        self._directory, self._prefix = directory, prefix
        self._item, row = item_of(recipe.encoding.dtype), recipe.encoding.sequence_tokens
        self._shard_tokens = max(recipe.shard_tokens // row, 1) * row  # no sequence of conversations is cut
        self._marked = isinstance(recipe.encoding, ConversationEncoding)
        self.tokens, self.documents = 0, 0
        self.shards: list[Shard] = []
        self.left_out = LeftOut()
        self._growing = Counter[str]()  # what the shard has that is being written
        self._hasher = blake3()
        self._file: BinaryIO | None = None

    def add(self, text: TokenisedText) -> None:
        """Append the ids. Each piece of text counts for the shard that it begins in."""
        at, ids = 0, text.ids.astype(self._item, copy=False)
        while at < len(ids):
            stop = min(len(ids), at + self._shard_tokens - self._growing["tokens"])
            self._append(ids[at:stop].tobytes())
            first, last = np.searchsorted(text.pieces[:, 0], (at, stop))
            if stop == len(ids):
                last = len(text.pieces)
            _, size, documents = text.pieces[first:last].sum(axis=0).tolist()
            self._growing.update(tokens=stop - at, documents=documents, bytes=size)
            if self._marked:
                trained = np.count_nonzero(ids[at:stop].astype(np.uint32) & np.uint32(TRAINED))
                self._growing["trained"] += int(trained)
            if self._growing["tokens"] == self._shard_tokens:
                self.finish_shard()
            at = stop
        self.tokens += len(ids)
        self.documents += int(text.pieces[:, 2].sum())
        self.left_out += text.left_out

    def finish_shard(self) -> None:
        """Finish the growing shard, if there is one, and make it durable."""
        if self._file is None:
            return
        with naming(Path(self._file.name)):
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        counts = {key: self._growing[key] for key in ("tokens", "documents", "bytes")}
        trained = self._growing["trained"] if self._marked else None
        self.shards.append(Shard(file=self._name, digest=self._hasher.hexdigest(), trained=trained, **counts))
        self._file, self._growing, self._hasher = None, Counter(), blake3()

    def close(self) -> None:
        """Close the growing shard's file without finishing the shard."""
        if self._file is not None:
            self._file.close()

    @property
    def _name(self) -> str:
        return f"{self._prefix}-{len(self.shards):05}.bin"

    def _append(self, content: bytes) -> None:
        if self._file is None:
            self._file = (self._directory / self._name).open("wb")
        with naming(Path(self._file.name)):
            self._file.write(content)
        self._hasher.update(content)
