"""Reads that are shared: made once for all who ask for the same and to whom one of some age will do.

Two hundred people who look at a run ask for the same every few seconds. Whoever needs what is true now says nothing,
and gets a read of his own.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

Value = TypeVar("Value")
READ_BYTES = 4096  # that each read is taken for, beside what it has found


@dataclass(frozen=True)
class _Read(Generic[Value]):
    began: float
    task: asyncio.Task[Value]


class Shared(Generic[Value]):
    """The last reads by key, the newest that take `most` bytes in all, by `size_of`; those that failed are not kept. On
    the event loop. `clock` gives seconds."""

    def __init__(self, size_of: Callable[[Value], int], most: int, clock: Callable[[], float]) -> None:
        self._size_of, self._most, self._clock = size_of, most, clock
        self._reads: dict[Hashable, _Read[Value]] = {}  # in the order in which they began

    async def read(self, key: Hashable, max_age_s: float, make: Callable[[], Awaitable[Value]]) -> tuple[Value, float]:
        """Return what a read of this key that began at most `max_age_s` ago has found, or else make one; and its age.

        It goes on for the others where one of those who wait for it goes away. Raises what `make` raises.
        """
        now = self._clock()
        known = self._reads.get(key)
        if known is None or now - known.began > max_age_s:
            self._reads.pop(key, None)
            known = self._reads[key] = _Read(now, asyncio.ensure_future(make()))
            known.task.add_done_callback(partial(self._over, key))
        return await asyncio.shield(known.task), now - known.began

    def _over(self, key: Hashable, task: asyncio.Task[Value]) -> None:
        """Keep a read that is over, and of the others what there is room for."""
        kept = self._reads.get(key)
        if kept is not None and kept.task is task and (task.cancelled() or task.exception() is not None):
            del self._reads[key]
        room = self._most
        for each in reversed(list(self._reads)):
            read = self._reads[each]
            if read.task.done():
                room -= READ_BYTES + self._size_of(read.task.result())
                if room < 0:
                    del self._reads[each]
