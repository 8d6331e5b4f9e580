"""Error feedback of deltas: what the download codec leaves out of a mean is added to the next round's mean, so that it
arrives late and not never (DoubleSqueeze, Tang et al. 2019, arXiv 1905.05957, algorithm 1).

What is left out is itself encoded in 8 bits, an error of an error, and is a blob of the coordinator's: the encoded
chunks of the fragment, one after the other. Workers need not know it: all apply the same delta, whatever it contains.
If it is lost, the next delta lacks it, and nothing else happens.
"""

import numpy as np

from outerstep.common.files import aligned
from protocol.codecs import CODECS
from protocol.codecs.base import F32, U8
from protocol.wire import CHUNK_ELEMENTS, chunk_sizes

_CODEC = CODECS["int8"]


def residual_bytes(elements: int) -> int:
    """Return the bytes of the blob for a fragment of `elements` values."""
    return sum(_CODEC.size(n) for n in chunk_sizes(elements, CHUNK_ELEMENTS))


class Residual:
    """What the delta of one round leaves out of a fragment of `elements` values. `content`: its blob. `before`: that of
    what the delta before has left out; None if there is none.

    Chunks may be taken in any order, each once: `add` and then `keep`.
    """

    def __init__(self, elements: int, before: memoryview | None = None) -> None:
        size = residual_bytes(elements)
        if before is not None and len(before) != size:
            raise ValueError(f"what the last delta has left out is {len(before)} bytes, expected {size}")
        self.content = aligned(size)
        self._before = None if before is None else np.frombuffer(before, np.uint8)
        self._after = np.frombuffer(self.content, np.uint8)

    def add(self, chunk: F32, index: int) -> None:
        """Add to the mean's chunk `index`, in place, what was left out before: chunk ← chunk + e."""
        if self._before is not None:
            left = np.empty_like(chunk)
            _CODEC.decode(_part(self._before, index, len(chunk)), left)
            chunk += left

    def keep(self, chunk: F32, decoded: F32, index: int) -> None:
        """Keep what was left out of chunk `index`: e ← chunk − decoded. Overwrites `decoded`."""
        np.subtract(chunk, decoded, out=decoded)
        _CODEC.encode(decoded, _part(self._after, index, len(chunk)))


def _part(content: U8, index: int, elements: int) -> U8:
    start = index * _CODEC.size(CHUNK_ELEMENTS)
    return content[start : start + _CODEC.size(elements)]
