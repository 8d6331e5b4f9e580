"""The shuffled order of training: which sequences of which shards make up a work unit. Pure; no I/O.

The order has two levels, so that a worker's consecutive units lie in few shards while every epoch differs. Each epoch
shuffles all shards. Eight consecutive shards of that order form a *window*, and the sequences of a window are shuffled
across all its shards. An epoch is its windows put end to end; its unit g consists of the sequences [g·B, (g + 1)·B),
B being the batch size. So a unit may begin in one window and end in the next. An epoch skips only its last sequences,
fewer than B, and other epochs skip others.

Everything is drawn from RandomState, whose streams numpy has frozen. Seeds: [seed, epoch, 0] for the order of the
shards, [seed, epoch, w] for the sequences of window w, except [seed, epoch] for window 0. So the order of a set with
one shard is RandomState([seed, epoch]).permutation(sequences), the same as before sets had shards.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

WINDOW_SHARDS = 8


class Places(NamedTuple):
    """Where the sequences of a unit are, in order. int64[batch_size] each."""

    shards: Integers
    rows: Integers  # the number of each sequence within its shard


class Order:
    """The order of a set. `sequences` is the number of sequences of each shard. Thread-safe.

    Keeps in memory the shard order of the last two epochs and the order of the last two windows.
    """

    def __init__(self, sequences: Sequence[int], batch_size: int, seed: int) -> None:
        self._sequences = np.array(sequences, np.int64)
        self._batch, self._seed = batch_size, seed
        self.units_per_epoch = int(self._sequences.sum()) // batch_size
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)
        self._window = lru_cache(maxsize=2)(self._draw_window)

    def places(self, number: int) -> Places:
        """Return the places of the sequences of unit `number`."""
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
        """Return the shards of the windows that unit `number` lies in, in order. Any may contain a part of it."""
        epoch, index = divmod(number, self.units_per_epoch)
        shards, bounds = self._epoch(epoch)
        windows = self._windows(bounds, index * self._batch, (index + 1) * self._batch)
        return shards[windows.start * WINDOW_SHARDS : windows.stop * WINDOW_SHARDS].tolist()

    @staticmethod
    def _windows(bounds: Integers, start: int, stop: int) -> range:
        """Return the windows that contain the positions [start, stop) of an epoch."""
        first, last = np.searchsorted(bounds, (start, stop - 1), "right") - 1
        return range(int(first), int(last) + 1)

    def _draw_epoch(self, epoch: int) -> tuple[Integers, Integers]:
        """Return the order of the shards, and the windows' bounds: where each begins, and where the last one ends."""
        shards = np.random.RandomState([self._seed, epoch, 0]).permutation(len(self._sequences))
        sizes = np.add.reduceat(self._sequences[shards], np.arange(0, len(shards), WINDOW_SHARDS))
        return shards, np.concatenate([[0], np.cumsum(sizes)])

    def _draw_window(self, epoch: int, w: int) -> Integers:
        _, bounds = self._epoch(epoch)
        key = [self._seed, epoch, w] if w else [self._seed, epoch]
        return np.random.RandomState(key).permutation(int(bounds[w + 1] - bounds[w]))
