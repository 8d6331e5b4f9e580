"""Packing: whole conversations into sequences of fixed length. Pure.

First-fit decreasing: the longest conversation first, each into the first sequence that has room for it. It needs at
most 11/9 of the fewest possible sequences, plus 6/9 (Dósa, "The tight bound of first fit decreasing bin-packing
algorithm is FFD(I) ≤ 11/9 OPT(I) + 6/9", 2007).
"""

from collections.abc import Sequence

import numpy as np


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return for each sequence the indices of its conversations, in order. Every length is at most `capacity`. Equal
    lengths are placed in order, so the result is a function of the arguments."""
    sequences: list[list[int]] = []
    room = np.empty(len(lengths), np.int64)  # of each sequence, the empty ones last
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = room[: len(sequences)] >= lengths[index]
        place = int(fits.argmax()) if fits.any() else len(sequences)
        if place == len(sequences):
            sequences.append([])
            room[place] = capacity
        sequences[place].append(index)
        room[place] -= lengths[index]
    return sequences
