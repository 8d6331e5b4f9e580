"""Error feedback of deltas: the residual, a delta's encoding error, is added to the next round's mean, so workers
receive it one round late (DoubleSqueeze, Tang et al. 2019, arXiv 1905.05957, algorithm 1).

The coordinator keeps the residual as a blob: the chunks of the fragment one after the other, each encoded in 8 bits.
Workers do not need it, because all of them apply the same delta. A lost residual is missing from the next delta and has
no other effect.
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
    """The residual of one delta, of a fragment of `elements` values. `content`: its blob. `before`: the blob of the
    previous delta's residual; None if there is none.

    Call `add` and then `keep` once for each chunk, in any order.
    """

    def __init__(self, elements: int, before: memoryview | None = None) -> None:
        size = residual_bytes(elements)
        if before is not None and len(before) != size:
            raise ValueError(f"the last delta's residual is {len(before)} bytes, expected {size}")
        self.content = aligned(size)
        self._before = None if before is None else np.frombuffer(before, np.uint8)
        self._after = np.frombuffer(self.content, np.uint8)

    def add(self, chunk: F32, index: int) -> None:
        """Add the previous residual to chunk `index` of the mean, in place: chunk ← chunk + e."""
        if self._before is not None:
            left = np.empty_like(chunk)
            _CODEC.decode(_part(self._before, index, len(chunk)), left)
            chunk += left

    def keep(self, chunk: F32, decoded: F32, index: int) -> None:
        """Keep the encoding error of chunk `index`: e ← chunk − decoded. Overwrites `decoded`."""
        np.subtract(chunk, decoded, out=decoded)
        _CODEC.encode(decoded, _part(self._after, index, len(chunk)))


def _part(content: U8, index: int, elements: int) -> U8:
    start = index * _CODEC.size(CHUNK_ELEMENTS)
    return content[start : start + _CODEC.size(elements)]
