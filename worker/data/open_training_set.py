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
from worker.data.sources.files import NamedFiles, changed, held_out_names, holdout_note, source_files
from worker.data.sources.hub import PREFIX
from worker.data.sources.kinds import BIN, COMPRESSED_TEXT, HUB, TEXT, first_with_crlf, kind_of_files
from worker.data.tokens import bin_files
from worker.data.tokens.index import FILE, Index, check_sizes, check_tokenizer, is_token_set, read_index
from worker.data.tokens.preparing import Progress, prepare, recipe_of
from worker.data.tokens.token_files import InDirectory, TokenFiles
from worker.data.tokens.tokenizer import BYTES, IN_BYTES, Tokenizer, load_tokenizer
from worker.data.training_set import InMemory, Sequences, token_sequences
from worker.errors import DataError

_REPORT_EVERY = 0.05  # of the work

log = logging.getLogger(__name__)


def open_training_set(
    spec: RunSpec,
    *,
    check: Callable[[int], object] = lambda vocabulary: None,
    stop: threading.Event | None = None,
    shards: CacheSettings | None = None,
) -> Sequences:
    """Return the run's training set on this machine. Prepares it first if necessary, until `stop` is set. `shards` is
    the cache for the shards of a set behind a URL.

    `check` is called with the vocabulary as soon as it is known, before hours are spent on preparing. Raises DataError,
    Stopped, and what `check` raises.
    """
    data = spec.data
    tokenizer = None if data.tokenizer is None else load_tokenizer(data.tokenizer)
    directory = Path(data.source).expanduser()
    is_url = is_remote(data.source)
    prepared = not is_url and is_token_set(directory)
    kind = None if is_url or prepared else _kind(data.source)
    if data.dtype is not None and kind != BIN:
        raise DataError(
            f"data.dtype is for .bin files without a header, and data.source = {data.source!r} has none: leave it out"
        )
    if is_url:
        remote = open_remote_set(spec, tokenizer, shards or CacheSettings(), stop or threading.Event())
        check(remote.vocabulary)
        return remote
    asked: float | None = data.holdout
    documents: int | None = None
    if prepared:
        asked, opened = None, open_token_set(spec, directory, tokenizer)
        check(opened.vocabulary)
    elif kind == BIN and data.format == "text":
        files = source_files(data.source)
        asked, opened = None if bin_files.held_out_files(files) else asked, _open_bin_files(spec, files, tokenizer)
        check(opened.vocabulary)
    else:
        opened = _open_text(spec, kind, tokenizer, check, stop)
        if kind in (TEXT, COMPRESSED_TEXT):
            files = source_files(data.source)
            documents, crlf = len(files), first_with_crlf(files)
            opened.summary = opened.summary.model_copy(update={"crlf": crlf})
    if (note := holdout_note(opened.tokens[1], opened.tokens[0], asked, documents)) is not None:
        log.warning("data.source = %r: %s", data.source, note)
    return opened


def _open_text(
    spec: RunSpec,
    kind: str | None,
    tokenizer: Tokenizer | None,
    check: Callable[[int], object],
    stop: threading.Event | None,
) -> Sequences:
    """Return a source of text of this kind, prepared if necessary. See `open_training_set`."""
    data = spec.data
    if tokenizer is None and data.format != "text":
        raise DataError(
            f'data.format = "{data.format}" needs data.tokenizer: the tokenizer of the model, with its chat template'
        )
    tokenizer = tokenizer or load_tokenizer(IN_BYTES)
    check(tokenizer.vocabulary)
    if kind == TEXT and tokenizer.name == IN_BYTES:
        return TextData(spec)
    recipe = recipe_of(data, tokenizer)
    cache = cache_directory("data") / recipe.digest()[:32]
    if not (cache / FILE).exists():
        log.info("preparing data.source = %r with the tokenizer %s in %s", data.source, tokenizer.name, cache)
    index = prepare(recipe, cache, report=_progress_log(), stop=stop)
    for sentence in [] if index.conversations is None else index.conversations.left_out():
        log.warning("data.source = %r: %s", data.source, sentence)
    return open_token_set(spec, cache, tokenizer)


def open_token_set(spec: RunSpec, directory: Path, tokenizer: Tokenizer | None) -> Sequences:
    """Return the token set in a directory. Raises DataError, also if it was made with another tokenizer than
    `tokenizer`, unless that is None."""
    index = read_index(directory / FILE)
    check_sizes(index.shards, index.item, directory)
    if tokenizer is not None:
        check_tokenizer(index, tokenizer, f"data.source = {spec.data.source!r}")
    return _sequences(spec, index, directory)


def _kind(source: str) -> str:
    return HUB if source.startswith(PREFIX) else kind_of_files(source, source_files(source))


def _open_bin_files(spec: RunSpec, files: NamedFiles, tokenizer: Tokenizer | None) -> Sequences:
    index = bin_files.index_of(files, spec.data.source, spec.data.holdout, tokenizer, spec.data.dtype)
    root = files[0][1]
    for _ in Path(files[0][0]).parts:
        root = root.parent
    return _sequences(spec, index, root)


def _sequences(spec: RunSpec, index: Index, directory: Path) -> Sequences:
    training, held_out = (
        TokenFiles(index, shards, InDirectory(shards, directory, index.item.itemsize))
        for shards in (index.training, index.held_out)
    )
    return token_sequences(spec, index, training, held_out)


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


class TextData(Sequences):
    """Text as bytes: the training set of `data.tokenizer = "bytes"`. `training` and `held_out` are uint8 token ids.

    Raises DataError if the files cannot be read, are not text, or are too small for one work unit.
    """

    def __init__(self, spec: RunSpec) -> None:
        source = spec.data.source
        try:
            files = source_files(source)
            if (kind := kind_of_files(source, files)) != TEXT:
                raise DataError(f"data.source = {source!r} is {kind}, which is not read as bytes")
            self.training, self.held_out, starts, digest = _read(files, spec.data.holdout)
        except OSError as error:
            raise DataError(f"data.source = {source!r}: {error_text(error)}") from error
        super().__init__(
            spec,
            InMemory(self.training),
            InMemory(self.held_out),
            digest=digest,
            vocabulary=BYTES,
            bytes_per_token=1.0 if len(self.held_out) else None,
            held_out_starts=starts,
        )


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
