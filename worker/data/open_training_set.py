"""Open a run's training set as `data.source` and `data.tokenizer` describe it: bytes in memory, or a token set.

Text that needs a tokenizer is prepared once, as `outerstep data prepare` does it, in a cache directory of this machine.
The directory's name is derived from what the set is made of (files by name, size, times and inode), so a second start
finds it without reading the source. Whether workers have the same text is checked later, by the digests of their token
sets.

Text that is read as bytes is not prepared: its files are put end to end in memory. docs/wire-format.md has the rules
(which files, the digest, what is held out).
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from outerstep.common.connections import error_text
from protocol.spec.run import RunSpec
from worker.data.fetching.remote_files import is_remote
from worker.data.fetching.remote_set import CacheSettings, open_remote_set
from worker.data.fetching.shard_cache import cache_directory
from worker.data.order import Integers
from worker.data.sources.files import NamedFiles, changed, held_out_names, holdout_note
from worker.data.sources.kinds import BIN, COMPRESSED_TEXT, TEXT, first_with_crlf
from worker.data.sources.rows import Rows
from worker.data.sources.source import Source, find_source
from worker.data.tokens import bin_files
from worker.data.tokens.index import FILE, Index, Shard, complete_index, is_token_set
from worker.data.tokens.preparing import Progress, Recipe, encoding_of, prepare
from worker.data.tokens.token_files import in_directory
from worker.data.tokens.tokenizer import BYTES, IN_BYTES, Tokenizer, load_tokenizer
from worker.data.training_set import InMemory, TrainingSet, open_tokens
from worker.errors import DataError

_REPORT_EVERY = 0.05  # of the work

log = logging.getLogger(__name__)


def open_training_set(
    spec: RunSpec,
    *,
    check: Callable[[int], object] = lambda vocabulary: None,
    stop: threading.Event | None = None,
    shards: CacheSettings | None = None,
) -> TrainingSet:
    """Return the run's training set on this machine. Prepares it first if necessary, until `stop` is set. `shards` is
    the cache for the shards of a set behind a URL.

    `check` is called with the vocabulary as soon as it is known, before hours are spent on preparing. Raises DataError,
    Stopped, and what `check` raises.
    """
    data = spec.data
    tokenizer = None if data.tokenizer is None else load_tokenizer(data.tokenizer)
    directory = Path(data.source).expanduser()
    if is_remote(data.source) or is_token_set(directory):
        source = None
    else:
        source = find_source(data.source, Rows(data.holdout, data.format, data.column))
    if data.dtype is not None and (source is None or source.kind != BIN):
        raise DataError(
            f"data.dtype is for .bin files without a header, and data.source = {data.source!r} has none: leave it out"
        )
    asked: float | None = data.holdout
    documents: int | None = None
    if is_remote(data.source):
        opened = open_remote_set(spec, tokenizer, shards or CacheSettings(), stop or threading.Event())
    elif source is None:
        asked, opened = None, _in_directory(spec, complete_index(directory), directory, tokenizer)
    elif source.kind == BIN:
        asked = None if bin_files.held_out_files(source.files) else asked
        opened = _open_bin_files(spec, source.files, tokenizer)
    else:
        opened = _open_text(spec, source, tokenizer, check, stop)
        if source.kind in (TEXT, COMPRESSED_TEXT):
            documents = len(source.files)
            opened.summary = opened.summary.model_copy(update={"crlf": first_with_crlf(source.files)})
    check(opened.vocabulary)
    note = None if is_remote(data.source) else holdout_note(opened.tokens[1], opened.tokens[0], asked, documents)
    if note is not None:
        log.warning("data.source = %r: %s", data.source, note)
    return opened


def _open_text(
    spec: RunSpec,
    source: Source,
    tokenizer: Tokenizer | None,
    check: Callable[[int], object],
    stop: threading.Event | None,
) -> TrainingSet:
    """Return a source of text, prepared if necessary. See `open_training_set`."""
    data = spec.data
    if tokenizer is None and data.format != "text":
        raise DataError(
            f'data.format = "{data.format}" needs data.tokenizer: the tokenizer of the model, with its chat template'
        )
    tokenizer = tokenizer or load_tokenizer(IN_BYTES)
    check(tokenizer.vocabulary)
    if source.kind == TEXT and tokenizer.name == IN_BYTES:
        return TextData(spec, source)
    recipe = Recipe([source], encoding_of(data, tokenizer))
    cache = cache_directory("data") / recipe.digest()[:32]
    if not (cache / FILE).exists():
        log.info("preparing data.source = %r with the tokenizer %s in %s", data.source, tokenizer.name, cache)
    index = prepare(recipe, cache, report=_progress_log(), stop=stop)
    for sentence in [] if index.conversations is None else index.conversations.left_out():
        log.warning("data.source = %r: %s", data.source, sentence)
    return _in_directory(spec, index, cache, tokenizer)


def _open_bin_files(spec: RunSpec, files: NamedFiles, tokenizer: Tokenizer | None) -> TrainingSet:
    index = bin_files.index_of(files, spec.data.source, spec.data.holdout, tokenizer, spec.data.dtype)
    root = files[0][1]
    for _ in Path(files[0][0]).parts:
        root = root.parent
    return _in_directory(spec, index, root, tokenizer)


def _in_directory(spec: RunSpec, index: Index, directory: Path, tokenizer: Tokenizer | None) -> TrainingSet:
    """Return the token set of this index, whose files are in `directory`."""
    training, held_out = (in_directory(index, shards, directory) for shards in (index.training, index.held_out))
    return open_tokens(spec, index, tokenizer, training, held_out)


def _progress_log() -> Callable[[Progress], None]:
    """Return a function that logs the progress of preparing, about every 5 %."""
    logged = 0.0

    def report(progress: Progress) -> None:
        nonlocal logged
        share = progress.done / progress.of if progress.of else progress.done / 1e10
        if share >= logged + _REPORT_EVERY:
            logged = share
            of = "" if progress.of is None else f" of {progress.of / 1e6:.0f}"
            log.info("prepared %.0f%s MB: %.1f M tokens", progress.done / 1e6, of, progress.tokens / 1e6)

    return report


class TextData(TrainingSet):
    """Text as bytes: the training set of `data.tokenizer = "bytes"`. `training` and `held_out` are uint8 token ids.

    Raises DataError if the files cannot be read, are not text, or are too small for one work unit.
    """

    def __init__(self, spec: RunSpec, source: Source | None = None) -> None:
        """`source`: that of the spec, if it has been found already."""
        source = source or find_source(spec.data.source, Rows(spec.data.holdout))
        if source.kind != TEXT:
            raise DataError(f"data.source = {source.name!r} is {source.kind}, which is not read as bytes")
        try:
            self.training, self.held_out, self._starts, digest = _read(source.files, spec.data.holdout)
        except OSError as error:
            raise DataError(f"data.source = {source.name!r}: {error_text(error)}") from error
        training, held_out = (
            [Shard(file=name, tokens=len(part), bytes=len(part), digest=digest)] if len(part) else []
            for name, part in (("training", self.training), ("held-out", self.held_out))
        )
        index = Index(
            dtype="uint8",
            vocabulary=BYTES,
            tokenizer=None,
            tokenizer_digest=None,
            end=None,
            source=source.name,
            training=training,
            held_out=held_out,
        )
        super().__init__(spec, index, InMemory(self.training), InMemory(self.held_out))
        self.summary = self.summary.model_copy(update={"digest": digest})  # of all files, as docs/wire-format.md has it

    def _document_starts(self) -> list[Integers]:
        return [self._starts]


def _read(
    files: NamedFiles, holdout: float
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], npt.NDArray[np.int64], str]:
    """Return training bytes, held-out bytes, where each held-out file begins, and the digest of all files. Each file is
    read once, into its final place."""
    sizes = {name: path.stat().st_size for name, path in files}
    held_out = held_out_names(sizes, holdout) if len(files) > 1 else set()
    held_out_bytes = sum(sizes[name] for name in held_out)
    parts = [np.empty(size, np.uint8) for size in (sum(sizes.values()) - held_out_bytes, held_out_bytes)]
    places, starts, hasher = [0, 0], [0], blake3()
    for name, path in files:
        part, size = int(name in held_out), sizes[name]
        content = parts[part][places[part] : places[part] + size]
        _read_into(path, content)
        places[part] += size
        if name in held_out:
            starts.append(places[part])
        hasher.update(f"{name}\0{size}\0".encode())
        hasher.update(content.data)
    if len(files) == 1:
        # A single file cannot be held out as a whole, so its end is.
        parts = np.split(parts[0], [len(parts[0]) - int(len(parts[0]) * holdout)])
    return parts[0], parts[1], np.array(sorted(set(starts[:-1]))), hasher.hexdigest()


def _read_into(path: Path, content: npt.NDArray[np.uint8]) -> None:
    with path.open("rb", buffering=0) as file:
        view, read = content.data, 0
        while count := file.readinto(view[read:]):
            read += count
        if read < len(content) or file.read(1):
            raise changed(path)
