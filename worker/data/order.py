"""The order of training, pure: which sequences of which shards make up a work unit.

It has two levels, so that a worker's consecutive units lie in few shards while no epoch is like another. Each epoch has
an order of all shards; eight after the other in that order are a *window*, whose sequences are in an order of their
own, over all of its shards. The epoch is its windows put end to end, and unit g of it the sequences [g·B, (g + 1)·B):
so a unit may begin in one window and end in the next, and all that an epoch leaves out is its last sequences, fewer
than B. Other epochs leave out others.

Everything is drawn from RandomState, whose streams numpy has frozen: [seed, epoch, 0] for the order of the shards,
[seed, epoch, w] for the sequences of window w, but [seed, epoch] for those of window 0. So the order of a set of one
shard is RandomState([seed, epoch]).permutation(sequences), as it was before there were shards.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from worker.data.ids import Integers

WINDOW_SHARDS = 8


class Places(NamedTuple):
    """Where the sequences of a unit are, in order: int64[batch_size] each."""

    shards: Integers
    rows: Integers  # of sequences within their shards


class Order:
    """The order of a set, whose shards have these numbers of sequences. Any thread may ask.

    Memory: the order of the shards, and those of the two windows that were asked for last.
    """

    def __init__(self, sequences: Sequence[int], batch_size: int, seed: int) -> None:
        self._sequences = np.array(sequences, np.int64)
        self._batch, self._seed = batch_size, seed
        self.units_per_epoch = int(self._sequences.sum()) // batch_size
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)
        self._window = lru_cache(maxsize=2)(self._draw_window)

    def places(self, number: int) -> Places:
        """Return where the sequences of unit `number` are."""
        epoch, index = divmod(number, self.units_per_epoch)
        start, stop = index * self._batch, (index + 1) * self._batch
        shards, bounds = self._epoch(epoch)
        parts: list[Places] = []
        for w in self._windows(bounds, start, stop):
            drawn = self._window(epoch, w)[max(start - bounds[w], 0) : stop - bounds[w]]
            of_window = shards[w * WINDOW_SHARDS : (w + 1) * WINDOW_SHARDS]
            ends = np.cumsum(self._sequences[of_window])
            at = np.searchsorted(ends, drawn, "right")
            parts.append(Places(of_window[at], drawn - (ends - self._sequences[of_window])[at]))
        return Places(*map(np.concatenate, zip(*parts, strict=True)))

    def shards(self, number: int) -> list[int]:
        """Return the shards of the windows that unit `number` lies in, in order: any of them may have some of it."""
        epoch, index = divmod(number, self.units_per_epoch)
        shards, bounds = self._epoch(epoch)
        windows = self._windows(bounds, index * self._batch, (index + 1) * self._batch)
        return shards[windows.start * WINDOW_SHARDS : windows.stop * WINDOW_SHARDS].tolist()

    @staticmethod
    def _windows(bounds: Integers, start: int, stop: int) -> range:
        """Return the windows in which the places [start, stop) of an epoch are."""
        first, last = np.searchsorted(bounds, (start, stop - 1), "right") - 1
        return range(int(first), int(last) + 1)

    def _draw_epoch(self, epoch: int) -> tuple[Integers, Integers]:
        """Return the order of the shards, and where each window begins in the epoch, and the last one ends."""
        shards = np.random.RandomState([self._seed, epoch, 0]).permutation(len(self._sequences))
        sizes = np.add.reduceat(self._sequences[shards], np.arange(0, len(shards), WINDOW_SHARDS))
        return shards, np.concatenate([[0], np.cumsum(sizes)])

    def _draw_window(self, epoch: int, w: int) -> Integers:
        _, bounds = self._epoch(epoch)
        key = [self._seed, epoch, w] if w else [self._seed, epoch]
        return np.random.RandomState(key).permutation(int(bounds[w + 1] - bounds[w]))
