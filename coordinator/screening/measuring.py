"""The measure of a contribution: its norm, and a sketch of its direction. It is kept to compare the contribution with
others when its bytes are no longer in memory.

A sketch folds the n values of a fragment into SKETCHED values, each value with a random sign (Charikar, Chen,
Farach-Colton 2002, one row; Weinberger et al. 2009, section 2, with positions in place of a hash):

    sketch[j] ← Σ_k sign(k · SKETCHED + j) · Δ[k · SKETCHED + j]

The inner product of two sketches is that of the vectors, with an error of about |a|·|b| / √SKETCHED. The signs come
from a secret key that differs by round and fragment. Without it, no worker can construct two different vectors with
equal sketches.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from protocol.wire import Payload

SKETCHED = 1 << 15

F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Measure:
    """One vector's L2 norm, and the sketch of its direction: float16[min(n, SKETCHED)] of norm 1, or zeros."""

    norm: float
    direction: F16


def measure_payload(payload: Payload, key: bytes) -> Measure:
    """Check a contribution and return its measure, in bounded memory. Contributions are comparable only if measured
    with the same `key`. Raises WireError unless all values are finite."""
    return sketch_payload(payload, key).measure()


def sketch_payload(payload: Payload, key: bytes) -> "Sketcher":
    """Check and decode a payload chunk by chunk, into a sketch."""
    memory = np.empty(max(payload.chunks), np.float32)
    sketcher = Sketcher(payload.header.elements, key)
    for index, n in enumerate(payload.chunks):
        chunk = payload.chunk(index)
        payload.codec.check(chunk, n, payload.limit)
        payload.codec.decode(chunk, memory[:n])
        sketcher.add(memory[:n])
    return sketcher


def unit(sketch: F32) -> F16:
    """Return the vector of norm 1 with the direction of `sketch`; zeros for zeros."""
    norm = math.sqrt(_squares(sketch))
    return (sketch / np.float32(norm) if norm > 0 else sketch).astype(np.float16)


class Sketcher:
    """Sketches a vector of `elements` values that arrives in pieces. Overwrites the pieces."""

    def __init__(self, elements: int, key: bytes) -> None:
        self._sum_of_squares, self._at = 0.0, 0
        self._folds = elements > SKETCHED
        self._signs = Signs(key)
        self.values = np.zeros(min(elements, SKETCHED), np.float32)

    def add(self, values: F32) -> None:
        self._sum_of_squares += _squares(values)
        if self._folds:
            self._signs.flip(values, self._at)
        self._fold(values)
        self._at += len(values)

    def _fold(self, values: F32) -> None:
        """Add the values in three parts: the rest of a row that was begun, whole rows, and the remainder."""
        begun = min(-self._at % SKETCHED, len(values))
        whole = (len(values) - begun) // SKETCHED * SKETCHED
        if begun:
            start = self._at % SKETCHED
            self.values[start : start + begun] += values[:begun]
        if whole:
            self.values += values[begun : begun + whole].reshape(-1, SKETCHED).sum(0)
        rest = values[begun + whole :]
        self.values[: len(rest)] += rest

    @property
    def norm(self) -> float:
        """The vector's L2 norm."""
        return math.sqrt(self._sum_of_squares)

    def measure(self) -> Measure:
        return Measure(self.norm, unit(self.values))


def _squares(values: F32) -> float:
    with np.errstate(over="ignore"):
        found = float(np.dot(values, values))
    return found if math.isfinite(found) else float(np.sum(np.square(values, dtype=np.float64)))


class Signs:
    """Random signs, one for each position of a vector. They do not depend on how the vector is split into pieces."""

    _BITS = 64 * 4  # of one step of Philox's counter

    def __init__(self, key: bytes) -> None:
        self._key = int.from_bytes(blake3(key).digest(16), "little")

    def flip(self, values: F32, at: int) -> None:
        """Multiply the values of positions [at, at + n) by their signs, in place."""
        steps, before = divmod(at, self._BITS)
        bits = before + len(values)
        words = np.random.Philox(key=self._key, counter=steps).random_raw(-(-bits // self._BITS) * 4)
        signs = np.unpackbits(words.view(np.uint8), bitorder="little")[before:bits]
        values.view(np.uint32)[:] ^= signs.astype(np.uint32) << np.uint32(31)
