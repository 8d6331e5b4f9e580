"""A token set behind a URL. Its shards are fetched into a size-limited cache of this machine as they are needed.

A worker fetches the shards of its own work units only, and those held-out shards that an evaluation reads. So a set may
be far larger than any worker's disk.
"""

import heapq
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from outerstep.common.answers import values_of
from protocol.spec.run import RunSpec
from worker.data.fetching.prefetching import Prefetcher
from worker.data.fetching.remote_files import open_remote
from worker.data.fetching.shard_cache import RemoteShard, ShardCache, cache_directory
from worker.data.order import WINDOW_SHARDS
from worker.data.tokens.index import FILE, Index, Shard, parse_index
from worker.data.tokens.token_files import TokenFiles
from worker.data.tokens.tokenizer import Tokenizer
from worker.data.training_set import TrainingSet, open_tokens
from worker.errors import DataError
from worker.line.retry import Retry

_INDEX_BYTES, _INDEX_VALUES = 64 << 20, 1 << 22  # upper limits; enough for 350,000 shards


@dataclass(frozen=True)
class CacheSettings:
    """The directory in which the shards of remote sets are kept, and its size limit in bytes."""

    directory: Path = field(default_factory=partial(cache_directory, "shards"))
    limit_bytes: int = 20_000_000_000


def open_remote_set(
    spec: RunSpec, tokenizer: Tokenizer | None, settings: CacheSettings, stop: threading.Event
) -> TrainingSet:
    """Return the token set at the URL `data.source`, made with `tokenizer` unless that is None.

    Waits until the server can be reached or `stop` is set. A caller that announces units with `expect` must close the
    set. Raises DataError and Stopped.
    """
    source = spec.data.source
    remote, retry = open_remote(source), Retry(stop, peer=f"data.source = {source!r}")
    content = retry(lambda: remote.whole(FILE, _INDEX_BYTES))
    if values_of(content) > _INDEX_VALUES:
        raise DataError(f"{remote.url(FILE)} has more than {_INDEX_VALUES} values: not the index of a token set")
    index = parse_index(content, remote.url(FILE))
    _check_room(index, settings)
    cache, closing = ShardCache(settings.directory, settings.limit_bytes, retry), threading.Event()

    def remote_shard(shard: Shard) -> RemoteShard:
        size = shard.tokens * index.item.itemsize
        read = partial(remote.read, shard.file, shard.offset, shard.offset + size)
        return RemoteShard(shard.digest, size, remote.url(shard.file), read)

    training, held_out = ([remote_shard(shard) for shard in part] for part in (index.training, index.held_out))
    background = cache.until(closing)
    prefetcher = Prefetcher(
        lambda number: background.fetch(training[number], needed()),
        [shard.size for shard in training],
        settings.limit_bytes,
        closing,
    )

    def needed() -> set[str]:
        return {training[number].digest for number in prefetcher.needed}

    def open_training(number: int) -> IO[bytes]:
        prefetcher.reached(number)
        return cache.open(training[number], needed())

    return open_tokens(
        spec,
        index,
        tokenizer,
        TokenFiles(index, _cached(index.training), open_training),
        TokenFiles(index, _cached(index.held_out), lambda number: cache.open(held_out[number], needed())),
        prefetcher,
    )


def _cached(shards: list[Shard]) -> list[Shard]:
    """Return the shards as they are in the cache: each in a separate file, from its first byte."""
    return [shard.model_copy(update={"offset": 0}) for shard in shards]


def _check_room(index: Index, settings: CacheSettings) -> None:
    """Raise DataError if the cache is too small for one work unit (the shards of two windows) or for one held-out
    shard: opening one would wait for room forever."""
    most = heapq.nlargest(2 * WINDOW_SHARDS, (shard.tokens for shard in index.training))
    unit, held_out = sum(most), max((shard.tokens for shard in index.held_out), default=0)
    needed = max(unit, held_out) * index.item.itemsize
    if needed > settings.limit_bytes:
        what = f"one work unit needs up to {len(most)} shards" if unit >= held_out else "an evaluation needs a shard"
        raise DataError(
            f"the data cache {settings.directory} is limited to {settings.limit_bytes / 1e9:.3g} GB, but {what} of "
            f"this set, {needed / 1e9:.3g} GB; raise the limit with OUTERSTEP_DATA_CACHE_GB"
        )
