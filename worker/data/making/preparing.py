"""A token set is made: sources of text, tokenised, as shards with an index.

The directory at any time:

    train-00000.bin, …    shards; the last one of either part may still grow
    held-out-00000.bin
    progress.json         how far it is: tasks that are done, finished shards, the length of the growing ones
    tokenizer/            and index.json, at the end, in place of progress.json

After each task what it became is durable, and then progress.json says so. Whoever begins again after a kill cuts the
growing shards to the length that is told and goes on with the next task; so the bytes are those that an undisturbed
run writes, and no task is done twice but those that were under way.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3
from pydantic import BaseModel, Field, ValidationError

from outerstep.common.files import NEW, replace_file, try_lock
from protocol.validation_errors import explain_all
from worker.data.making.growing import BEGIN_AGAIN, GrowingPart, Grown
from worker.data.making.tokenising import Result, tokenised
from worker.data.sources.pieces import TASK_BYTES
from worker.data.sources.source import Source, cores
from worker.data.tokens.index import FILE, PROGRESS, Index, Item, check_sizes, dtype_for, item_of, read_index
from worker.data.tokens.tokenizer import Tokenizer
from worker.errors import DataError, Stopped

SHARD_TOKENS = 1 << 26
TOKENIZER = "tokenizer"
_ASK_AGAIN_S = 0.5
_ELSEWHERE = "choose another directory, or delete it"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """What a token set is made of. The same recipe makes the same bytes, on any machine and any number of cores."""

    sources: Sequence[Source]
    tokenizer: Tokenizer
    shard_tokens: int = SHARD_TOKENS
    task_bytes: int = TASK_BYTES

    def digest(self) -> str:
        """Return what tells it from any other: files by name, size and time, the tokenizer by its content."""
        tokenizer = (self.tokenizer.digest, self.tokenizer.end)
        sources = [source.identity() for source in self.sources]
        parts = [1, sources, tokenizer, self.shard_tokens, self.task_bytes]
        return blake3(json.dumps(parts, separators=(",", ":")).encode()).hexdigest()


class HowFar(NamedTuple):
    """How far the work is: bytes of the sources, and of how many (None: nobody knows); tokens made of them."""

    done: int
    of: int | None
    tokens: int


class _Progress(BaseModel):
    made_from: str
    source: int = 0
    tasks: int = 0  # of that source
    rows: int = 0
    size: int = 0  # of all sources
    training: Grown = Field(default_factory=Grown)
    held_out: Grown = Field(default_factory=Grown)

    def done(self, result: Result, training: Grown, held_out: Grown) -> None:
        """Count a task as done."""
        self.tasks, self.rows, self.size = self.tasks + 1, self.rows + result.rows, self.size + result.size
        self.training, self.held_out = training, held_out


def prepare(
    recipe: Recipe,
    out: Path,
    *,
    processes: int | None = None,
    tell: Callable[[HowFar], None] = lambda how_far: None,
    stop: threading.Event | None = None,
) -> Index:
    """Make the token set in `out`, or go on with it, and return its index; at once, if it is there already.

    `tell` is called after each task. With `stop`, it waits for another process that works in `out`, and raises Stopped
    once that is set. Raises DataError for what cannot be read or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _alone_in(out, stop):
            return _prepare(recipe, out, processes or cores(), tell, stop)
    except OSError as error:
        raise DataError(f"while {out} was prepared: {error}; the same command goes on where this one was") from error


def _prepare(
    recipe: Recipe, out: Path, processes: int, tell: Callable[[HowFar], None], stop: threading.Event | None
) -> Index:
    made_from = recipe.digest()
    if (out / FILE).exists():
        index = read_index(out / FILE)
        if index.made_from != made_from:
            raise DataError(f"{out} has another token set, of {index.source}; {_ELSEWHERE}")
        check_sizes(index.shards, index.item, out)
        (out / PROGRESS).unlink(missing_ok=True)  # of whoever was killed between the two
        return index
    item = item_of(dtype_for(recipe.tokenizer.vocabulary))
    progress = _read_progress(out, made_from, item)
    training = GrowingPart(out, "train", item, recipe.shard_tokens, progress.training)
    held_out = GrowingPart(out, "held-out", item, recipe.shard_tokens, progress.held_out)
    sizes = [source.size for source in recipe.sources]
    of = None if None in sizes else sum(size or 0 for size in sizes)
    try:
        with closing(_results(recipe, progress, item, processes)) as results:  # and so the processes end
            for result in results:
                training.add(result.training)
                held_out.add(result.held_out)
                training.sync()
                held_out.sync()
                progress.done(result, training.grown, held_out.grown)
                _write(out / PROGRESS, progress.model_dump_json())
                tell(HowFar(progress.size, of, _tokens(training.grown) + _tokens(held_out.grown)))
                if stop is not None and stop.is_set():
                    raise Stopped("stopped while the training set was prepared")
        training.finish_shard()
        held_out.finish_shard()
    finally:
        training.close()
        held_out.close()
    return _finish(recipe, out, made_from, training.grown, held_out.grown)


def _results(recipe: Recipe, progress: _Progress, item: Item, processes: int) -> Generator[Result, None, None]:
    """Yield what becomes of the tasks that are not done yet, source by source."""
    while progress.source < len(recipe.sources):
        tasks = recipe.sources[progress.source].tasks(progress.tasks, progress.rows, recipe.task_bytes)
        yield from tokenised(tasks, recipe.tokenizer, item, processes)
        progress.source, progress.tasks, progress.rows = progress.source + 1, 0, 0


def _finish(recipe: Recipe, out: Path, made_from: str, training: Grown, held_out: Grown) -> Index:
    names = ", ".join(source.name for source in recipe.sources)
    if not training.shards:
        raise DataError(f"{names} has no text to train on; give more text, or hold out less")
    tokenizer = recipe.tokenizer
    index = Index(
        dtype=dtype_for(tokenizer.vocabulary),
        vocabulary=tokenizer.vocabulary,
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer.digest,
        end=tokenizer.end,
        source=names,
        made_from=made_from,
        training=training.shards,
        held_out=held_out.shards,
    )
    tokenizer.save(out / TOKENIZER)
    _write(out / FILE, index.text())
    (out / PROGRESS).unlink(missing_ok=True)
    return index


def _read_progress(out: Path, made_from: str, item: Item) -> _Progress:
    """Return how far the set is. Raises DataError if the directory has something else in it."""
    try:
        progress = _Progress.model_validate_json((out / PROGRESS).read_bytes())
    except FileNotFoundError:
        if any(path.name != f"{PROGRESS}{NEW}" for path in out.iterdir()):
            raise DataError(f"{out} is not empty and no token set; {_ELSEWHERE}") from None
        progress = _Progress(made_from=made_from)
        _write(out / PROGRESS, progress.model_dump_json())  # before any shard: from now on this is a beginning
        return progress
    except ValidationError as error:
        raise DataError(
            f"{out / PROGRESS} cannot be read: {explain_all(error.errors(), most=3)}; {BEGIN_AGAIN}"
        ) from error
    if progress.made_from != made_from:
        raise DataError(
            f"{out} has the beginning of a set of other text, or of the same by another tokenizer or other options; "
            f"{_ELSEWHERE}"
        )
    check_sizes(progress.training.shards + progress.held_out.shards, item, out)
    return progress


def _tokens(grown: Grown) -> int:
    return sum(shard.tokens for shard in grown.shards) + grown.tokens


def _write(path: Path, text: str) -> None:
    replace_file(path, lambda file: file.write(text.encode()))


@contextmanager
def _alone_in(out: Path, stop: threading.Event | None) -> Iterator[None]:
    """Hold the directory's lock, which ends with the process."""
    descriptor = os.open(out, os.O_RDONLY)
    try:
        if not try_lock(descriptor):
            if stop is None:
                raise DataError(f"another process works in {out}; wait for it, or choose another directory")
            log.info("another process prepares %s: waiting for it", out)
            while not try_lock(descriptor):
                if stop.wait(_ASK_AGAIN_S):
                    raise Stopped("stopped while another process prepared the training set")
        yield
    finally:
        os.close(descriptor)
