"""Shuffles as docs/wire-format.md describes them: with a Mersenne twister and nothing else of numpy."""

import random

import numpy as np


def shuffled(n: int, *words: int) -> list[int]:
    """An order of 0 to n - 1, drawn by a twister that is seeded with these words."""
    _, key, position, *_ = np.random.RandomState(list(words)).get_state(legacy=True)
    twister = random.Random()
    twister.setstate((3, (*map(int, key), int(position)), None))
    order = list(range(n))
    for i in range(n - 1, 0, -1):
        j = draw(twister, i)
        order[i], order[j] = order[j], order[i]
    return order


def draw(twister: random.Random, most: int) -> int:
    mask = (1 << most.bit_length()) - 1
    while True:
        value = twister.getrandbits(32) & mask
        if value <= most:
            return value
