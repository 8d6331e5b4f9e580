"""A run's training set, whatever `data.source` and `data.tokenizer` say: bytes in memory, or a token set.

There is one way to what has to be tokenised: it is prepared, here as by `outerstep data prepare`, into a cache
directory of this machine, once. The directory is named by what the set is made of, files by name, size and time, so
that a second start finds it without reading the source; that workers have the same text is seen by the digests of what
became of it.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from protocol.spec.run import RunSpec
from protocol.spec.sections import DataSpec
from worker.data.caches import cache_directory
from worker.data.fetching.remote import is_remote
from worker.data.fetching.shards import CacheSettings, open_remote_set
from worker.data.making.preparing import HowFar, Recipe, prepare
from worker.data.sequences import Sequences
from worker.data.sources.files import source_files
from worker.data.sources.hub import PREFIX
from worker.data.sources.source import BIN, TEXT, find_source, kind_of
from worker.data.text import TextData
from worker.data.token_set import token_sequences
from worker.data.tokens import bins
from worker.data.tokens.index import FILE, Index, check_sizes, check_tokenizer, is_token_set, read_index
from worker.data.tokens.token_files import InDirectory, TokenFiles
from worker.data.tokens.tokenizer import IN_BYTES, Tokenizer, load_tokenizer
from worker.data.training_set import TrainingSet

_TOLD_EVERY = 0.05  # of the work

log = logging.getLogger(__name__)


def open_training_set(
    spec: RunSpec,
    *,
    check: Callable[[int], object] = lambda vocabulary: None,
    stop: threading.Event | None = None,
    shards: CacheSettings | None = None,
) -> TrainingSet:
    """Return the run's training set on this machine, prepared if it has to be, until `stop` is set. `shards` says where
    those of a set behind a URL are kept.

    `check` is called with the vocabulary as soon as that is known, before hours are spent on preparing. Raises
    DataError, Stopped, and what `check` raises.
    """
    data = spec.data
    tokenizer = None if data.tokenizer is None else load_tokenizer(data.tokenizer)
    if is_remote(data.source):
        remote = open_remote_set(spec, tokenizer, shards or CacheSettings(), stop or threading.Event())
        check(remote.vocabulary)
        return remote
    directory = Path(data.source).expanduser()
    prepared = is_token_set(directory)
    kinds = set() if prepared else _kinds(data)
    if prepared or kinds == {BIN}:
        opened = open_token_set(spec, directory, tokenizer) if prepared else _open_bins(spec, tokenizer)
        check(opened.vocabulary)
        return opened
    tokenizer = tokenizer or load_tokenizer(IN_BYTES)
    check(tokenizer.vocabulary)
    if TEXT in kinds and tokenizer.name == IN_BYTES:
        return TextData(spec)
    recipe = Recipe([find_source(data.source, data.column, data.holdout)], tokenizer)
    cache = cache_directory("data") / recipe.digest()[:32]
    if not (cache / FILE).exists():
        log.info("preparing data.source = %r by the tokenizer %s in %s", data.source, tokenizer.name, cache)
    prepare(recipe, cache, tell=_teller(), stop=stop)
    return open_token_set(spec, cache, tokenizer)


def open_token_set(spec: RunSpec, directory: Path, tokenizer: Tokenizer | None) -> Sequences:
    """Return the token set of a directory, made by `tokenizer` if that is known. Raises DataError."""
    index = read_index(directory / FILE)
    check_sizes(index.shards, index.item, directory)
    if tokenizer is not None:
        check_tokenizer(index, tokenizer, f"data.source = {spec.data.source!r}")
    return _sequences(spec, index, directory)


def _kinds(data: DataSpec) -> set[str]:
    return set() if data.source.startswith(PREFIX) else {kind_of(name) for name, _ in source_files(data.source)}


def _open_bins(spec: RunSpec, tokenizer: Tokenizer | None) -> Sequences:
    files = source_files(spec.data.source)
    index = bins.index_of(files, spec.data.source, spec.data.holdout, tokenizer)
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


def _teller() -> Callable[[HowFar], None]:
    """Return what logs how far the preparing is, now and then."""
    told = 0.0

    def tell(how_far: HowFar) -> None:
        nonlocal told
        share = how_far.done / how_far.of if how_far.of else how_far.done / 1e10
        if share >= told + _TOLD_EVERY:
            told = share
            of = "" if how_far.of is None else f" of {how_far.of / 1e6:.0f}"
            log.info("prepared %.0f%s MB: %.1f M tokens", how_far.done / 1e6, of, how_far.tokens / 1e6)

    return tell
