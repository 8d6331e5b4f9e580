"""A token set behind a URL. Its shards are fetched into a size-limited cache of this machine as they are needed.

A worker fetches the shards of its own work units only, and those held-out shards that an evaluation reads. So a set may
be far larger than any worker's disk.

Threads prefetch the shards in the order in which they will be used. The units of this round are known from the worker's
assignment. Those of the next round are guessed: as the coordinator assigns units in order, the next round's are assumed
to lie as far after this round's as these lie after the previous one's. Guessed shards are fetched last, and only as far
as there is room beside the others, so a wrong guess costs nothing but the transfer.
"""

import atexit
import heapq
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from outerstep.common.answers import values_of
from protocol.errors import OuterstepError
from protocol.spec.run import RunSpec
from worker.data.fetching.remote_files import RemoteFiles, open_remote
from worker.data.fetching.shard_cache import RemoteShard, ShardCache, cache_directory
from worker.data.order import WINDOW_SHARDS, Order
from worker.data.tokens.index import FILE, Index, Shard, check_tokenizer, parse_index
from worker.data.tokens.token_files import TokenFiles
from worker.data.tokens.tokenizer import Tokenizer
from worker.data.training_set import Sequences, token_sequences
from worker.errors import DataError, Stopped
from worker.line.retry import Retry, Signal

THREADS = 4  # it takes several connections to use all of a line with a long round trip
_CLOSE_TIMEOUT_S = 3.0
_INDEX_BYTES, _INDEX_VALUES = 64 << 20, 1 << 22  # upper limits; enough for 350,000 shards

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheSettings:
    """The directory in which the shards of remote sets are kept, and its size limit in bytes."""

    directory: Path = field(default_factory=partial(cache_directory, "shards"))
    limit_bytes: int = 20_000_000_000


def open_remote_set(
    spec: RunSpec, tokenizer: Tokenizer | None, settings: CacheSettings, stop: threading.Event
) -> Sequences:
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
    if tokenizer is not None:
        check_tokenizer(index, tokenizer, f"data.source = {source!r}")
    _check_room(index, settings)
    cache = ShardCache(settings.directory, settings.limit_bytes, retry)
    training = [_remote_shard(shard, index, remote) for shard in index.training]

    def needed() -> set[str]:
        return {training[number].digest for number in prefetcher.needed}

    closing = PrefetchStop(stop)
    background = cache.until(closing)
    sizes = [shard.size for shard in training]
    prefetcher = Prefetcher(
        lambda number: background.fetch(training[number], needed()), sizes, settings.limit_bytes, closing
    )

    def open_training(number: int) -> IO[bytes]:
        prefetcher.reached(number)
        return cache.open(training[number], needed())

    def open_held_out(number: int) -> IO[bytes]:
        return cache.open(_remote_shard(index.held_out[number], index, remote), needed())

    return token_sequences(
        spec,
        index,
        TokenFiles(index, _cached(index.training), open_training),
        TokenFiles(index, _cached(index.held_out), open_held_out),
        prefetcher,
    )


def _remote_shard(shard: Shard, index: Index, remote: RemoteFiles) -> RemoteShard:
    size = shard.tokens * index.item.itemsize
    return RemoteShard(
        shard.digest, size, remote.url(shard.file), lambda: remote.read(shard.file, shard.offset, shard.offset + size)
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


class PrefetchStop:
    """The `Signal` that ends prefetching: set by `close`, or when `stop` is set. Only `close` wakes waiting threads, as
    nothing waits for them after `stop`."""

    def __init__(self, stop: Signal) -> None:
        self._stop, self._closed = stop, threading.Event()

    def close(self) -> None:
        self._closed.set()

    def is_set(self) -> bool:
        return self._closed.is_set() or self._stop.is_set()

    def wait(self, timeout: float) -> bool:
        self._closed.wait(timeout)
        return self.is_set()


class Prefetcher:
    """Fetches expected shards in THREADS threads, which start with the first call.

    `fetch(shard)` fetches a shard of `sizes[shard]` bytes. It raises Stopped soon after `closing` is set, which ends
    the thread. A shard is fetched once there is room for it in `limit_bytes` beside those that are needed sooner.

    The owner must close it. It is also closed when the process exits, because a library that is running in a thread at
    that time may crash the process.
    """

    def __init__(
        self, fetch: Callable[[int], None], sizes: Sequence[int], limit_bytes: int, closing: PrefetchStop
    ) -> None:
        self._fetch, self._sizes, self._limit_bytes, self._closing = fetch, sizes, limit_bytes, closing
        self._changed = threading.Condition()
        self._expected: list[int] = []
        self._next = 0  # index in `_expected` of the next shard to fetch
        self._reached = 0  # index in `_expected` of the last shard that was used
        self._round: range | None = None  # the units that were expected last
        self._threads: list[threading.Thread] = []

    def __call__(self, order: Order, units: Sequence[int]) -> None:
        """Fetch the shards of these units, and then those of the guessed units of the next round."""
        shards = dict.fromkeys(shard for unit in [*units, *self._guess(units)] for shard in order.shards(unit))
        with self._changed:
            self._expected, self._next, self._reached = list(shards), 0, 0
            self._changed.notify_all()
            if not self._threads:
                self._threads = [threading.Thread(target=self._run, name="fetch", daemon=True) for _ in range(THREADS)]
                for thread in self._threads:
                    thread.start()
                atexit.register(self.close)

    def close(self) -> None:
        """Stop fetching. Waits briefly for fetches that are in progress."""
        self._closing.close()
        with self._changed:
            self._changed.notify_all()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
        atexit.unregister(self.close)

    @property
    def needed(self) -> list[int]:
        """The shards that are in use, or were prefetched and will be used."""
        with self._changed:
            return self._expected[self._needed_from : self._next]

    @property
    def _needed_from(self) -> int:
        return max(self._reached - WINDOW_SHARDS + 1, 0)

    def reached(self, shard: int) -> None:
        """Note that a shard is being used: shards of earlier windows are no longer needed."""
        with self._changed:
            if shard in self._expected:
                self._reached = max(self._reached, self._expected.index(shard))
                self._changed.notify_all()

    def _guess(self, units: Sequence[int]) -> range:
        """Return the guessed units of the next round. The last consecutive `units` are this round's."""
        first = last = units[-1]
        for unit in reversed(units):
            if unit < first - 1:
                break
            first = unit
        before, self._round = self._round, range(first, last + 1)
        distance = len(self._round) if before is None or before.start >= first else first - before.start
        return range(first + distance, last + distance + 1)

    def _run(self) -> None:
        while (shard := self._await_next()) is not None:
            try:
                self._fetch(shard)
            except Stopped:
                return
            except (OuterstepError, OSError) as error:
                log.warning("prefetching failed: %s", error)  # raised again when the shard is needed

    def _await_next(self) -> int | None:
        """Wait until the next shard can be fetched, and return it; None if there is nothing more to do."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing.is_set() or self._has_room())
            if self._closing.is_set():
                return None
            self._next += 1
            return self._expected[self._next - 1]

    def _has_room(self) -> bool:
        """Return True if there is a next shard, not one that training has passed, and room for it."""
        self._next = max(self._next, self._needed_from)
        ahead = self._expected[self._needed_from : self._next + 1]
        return self._next < len(self._expected) and sum(self._sizes[each] for each in ahead) <= self._limit_bytes
