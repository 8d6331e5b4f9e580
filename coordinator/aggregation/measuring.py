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
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from protocol.codecs.base import Codec
from protocol.compiled import kernels
from protocol.wire import Payload

SKETCHED = 1 << 15
LANES = 16  # partial sums of squares, in kernels.c too
_ROWS = 1 << 9  # of squares at once

F16 = npt.NDArray[np.float16]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Measure:
    """One vector's L2 norm, and the sketch of its direction: float16[min(n, SKETCHED)] of norm 1, or zeros."""

    norm: float
    direction: F16


def measure_payload(payload: Payload, key: bytes) -> Measure:
    """Check a contribution and return its measure, in bounded memory. Contributions are comparable only if measured
    with the same `key`. Raises WireError unless all values are finite."""
    sketcher = Sketcher(payload.header.elements, key)
    for _ in sketch_chunks(payload, sketcher):
        pass
    return sketcher.measure()


def sketch_chunks(payload: Payload, sketcher: "Sketcher") -> Iterator[tuple[U8, int]]:
    """Check and sketch a payload chunk by chunk. Yield each chunk, as it is encoded, and its number of values."""
    for index, n in enumerate(payload.chunks):
        chunk = payload.chunk(index)
        payload.codec.check(chunk, n, payload.limit)
        sketcher.add_encoded(payload.codec, chunk, n)
        yield chunk, n


def unit(sketch: F32) -> F16:
    """Return the vector of norm 1 with the direction of `sketch`; zeros for zeros."""
    length = math.sqrt(squares(sketch))
    return (sketch / np.float32(length) if length > 0 else sketch).astype(np.float16)


def squares(values: F32) -> float:
    """Return the sum of the squares of the values: the same bits on every machine."""
    lanes = np.zeros(LANES)
    _add_squares(values, 0, lanes)
    return math.fsum(lanes)


class Sketcher:
    """Sketches a vector of `elements` values that arrives in pieces, encoded or not. May overwrite the values of `add`.

    The result is the same bits on every machine, however the vector is split: squares are added up in fp64, in LANES
    sums by position, and the sketch in order.
    """

    def __init__(self, elements: int, key: bytes) -> None:
        self._at = 0
        self._lanes = np.zeros(LANES)
        self._folds = elements > SKETCHED
        self._signs = Signs(key)
        self.values = np.zeros(min(elements, SKETCHED), np.float32)
        self._decoded = np.empty(0, np.float32)

    def add_encoded(self, codec: Codec, chunk: U8, n: int) -> None:
        """Add n values that are encoded in `chunk`."""
        if codec.sketch is not None and self._folds:
            codec.sketch(chunk, n, self._at, self._signs.bits(self._at, n), self.values, self._lanes)
            self._at += n
            return
        if len(self._decoded) < n:
            self._decoded = np.empty(n, np.float32)
        codec.decode(chunk, self._decoded[:n])
        self.add(self._decoded[:n])

    def add(self, values: F32) -> None:
        n = len(values)
        if not self._folds:
            _add_squares(values, self._at, self._lanes)
            self.values[self._at : self._at + n] += values
        elif kernels is not None:
            kernels.sketch(values, n, self._at, self._signs.bits(self._at, n), self.values, self._lanes)
        else:
            _add_squares(values, self._at, self._lanes)
            self._signs.flip(values, self._at)
            self._fold(values)
        self._at += n

    def _fold(self, values: F32) -> None:
        """Add the values row by row."""
        start = 0
        while start < len(values):
            at = (self._at + start) % SKETCHED
            stop = min(start + SKETCHED - at, len(values))
            self.values[at : at + stop - start] += values[start:stop]
            start = stop

    @property
    def norm(self) -> float:
        """The vector's L2 norm."""
        return math.sqrt(math.fsum(self._lanes))

    def measure(self) -> Measure:
        return Measure(self.norm, unit(self.values))


def _add_squares(values: F32, at: int, lanes: F64) -> None:
    """Add the squares of the values of positions [at, at + n) to the lanes of their positions, in order."""
    begun = min(-at % LANES, len(values))
    whole = begun + (len(values) - begun) // LANES * LANES
    lanes[at % LANES : at % LANES + begun] += np.square(values[:begun], dtype=np.float64)
    for start in range(begun, whole, _ROWS * LANES):
        rows = np.square(values[start : min(start + _ROWS * LANES, whole)], dtype=np.float64).reshape(-1, LANES)
        rows[0] += lanes
        rows.sum(axis=0, out=lanes)  # adds one row after the other
    lanes[: len(values) - whole] += np.square(values[whole:], dtype=np.float64)


class Signs:
    """Random signs, one bit for each position of a vector: the output of BLAKE3 for the key, which is as long as one
    likes. They do not depend on how the vector is split into pieces."""

    def __init__(self, key: bytes) -> None:
        self._stream = blake3(key)

    def bits(self, at: int, n: int) -> U8:
        """Return the signs of positions [at, at + n), lowest bit first; before them, those of at % 8 positions."""
        first = at // 8
        return np.frombuffer(self._stream.digest(-(-(at + n) // 8) - first, seek=first), np.uint8)

    def flip(self, values: F32, at: int) -> None:
        """Multiply the values of positions [at, at + n) by their signs, in place."""
        signs = np.unpackbits(self.bits(at, len(values)), bitorder="little")[at % 8 : at % 8 + len(values)]
        values.view(np.uint32)[:] ^= signs.astype(np.uint32) << np.uint32(31)
