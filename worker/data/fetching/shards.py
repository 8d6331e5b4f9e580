"""A token set behind a URL: its shards are fetched into a bounded directory of this machine as they are needed.

A worker fetches those of its own units: of this round, from its assignment, then of the next one, by a guess
(ahead.py), and of the held-out part those that an evaluation reads. So a set may be far larger than any worker's disk.
"""

import heapq
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from outerstep.common.answers import values_of
from protocol.spec.run import RunSpec
from worker.data.caches import cache_directory
from worker.data.fetching.ahead import Closing, FetchAhead
from worker.data.fetching.remote import Remote, open_remote
from worker.data.fetching.shard_cache import ShardCache, Wanted
from worker.data.order import WINDOW_SHARDS
from worker.data.sequences import Sequences
from worker.data.token_set import token_sequences
from worker.data.tokens.index import FILE, Index, Shard, check_tokenizer, parse_index
from worker.data.tokens.token_files import TokenFiles
from worker.data.tokens.tokenizer import Tokenizer
from worker.errors import DataError
from worker.line.retry import Retry

_INDEX_BYTES, _INDEX_VALUES = 64 << 20, 1 << 22  # at most: of 350,000 shards


@dataclass(frozen=True)
class CacheSettings:
    """Where the shards of remote sets are kept, and how many bytes of them."""

    directory: Path = field(default_factory=partial(cache_directory, "shards"))
    limit_bytes: int = 20_000_000_000


def open_remote_set(
    spec: RunSpec, tokenizer: Tokenizer | None, settings: CacheSettings, stop: threading.Event
) -> Sequences:
    """Return the token set at the URL `data.source`, made by `tokenizer` if that is known.

    Waits for a line that is down, until `stop` is set. Whoever expects units of it closes it. Raises DataError and
    Stopped.
    """
    source = spec.data.source
    remote, retry = open_remote(source), Retry(stop, peer=f"data.source = {source!r}")
    content = retry(lambda: remote.whole(FILE, _INDEX_BYTES))
    if values_of(content) > _INDEX_VALUES:
        raise DataError(f"{remote.url(FILE)} has more than {_INDEX_VALUES} values: it is not the index of a token set")
    index = parse_index(content, remote.url(FILE))
    if tokenizer is not None:
        check_tokenizer(index, tokenizer, f"data.source = {source!r}")
    _check_room(index, settings)
    cache = ShardCache(settings.directory, settings.limit_bytes, retry)
    training = [_wanted(shard, index, remote) for shard in index.training]

    def digests(numbers: Iterable[int]) -> set[str]:
        return {training[number].digest for number in numbers}

    closing = Closing(stop)
    beside = cache.until(closing)
    ahead = FetchAhead(lambda number, before: beside.fetch(training[number], [training[b] for b in before]), closing)

    def open_training(number: int) -> IO[bytes]:
        ahead.reached(number)
        return cache.open(training[number], digests(ahead.needed))

    def open_held_out(number: int) -> IO[bytes]:
        return cache.open(_wanted(index.held_out[number], index, remote), digests(ahead.needed))

    return token_sequences(
        spec,
        index,
        TokenFiles(index, _alone(index.training), open_training),
        TokenFiles(index, _alone(index.held_out), open_held_out),
        ahead,
    )


def _wanted(shard: Shard, index: Index, remote: Remote) -> Wanted:
    size = shard.tokens * index.item.itemsize
    end = shard.offset + size
    return Wanted(
        shard.digest, size, remote.url(shard.file), lambda start: remote.read(shard.file, shard.offset + start, end)
    )


def _alone(shards: list[Shard]) -> list[Shard]:
    """Return the shards as they are in the cache: each in a file of its own."""
    return [shard.model_copy(update={"offset": 0}) for shard in shards]


def _check_room(index: Index, settings: CacheSettings) -> None:
    """Raise DataError unless the cache has room for all that one unit may need, the shards of two windows, and for any
    that is held out: room that it never has would be waited for."""
    most = heapq.nlargest(2 * WINDOW_SHARDS, (shard.tokens for shard in index.training))
    unit, held_out = sum(most), max((shard.tokens for shard in index.held_out), default=0)
    needed = max(unit, held_out) * index.item.itemsize
    if needed > settings.limit_bytes:
        who = f"one work unit needs up to {len(most)} shards" if unit >= held_out else "an evaluation needs a shard"
        raise DataError(
            f"the data cache {settings.directory} may have {settings.limit_bytes / 1e9:.3g} GB; {who} of "
            f"this set, {needed / 1e9:.3g} GB: give it more by --data-cache-gb"
        )
