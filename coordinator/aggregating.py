"""The mean of the contributions: payloads in, frames of a delta out. Pure arithmetic in bounded memory.

One chunk at a time: however many workers contribute, what is held is one fp32 chunk, one worker's encoded chunk and the
encoded delta. The sum runs in worker-id order, never in order of arrival, so the bytes do not depend on timing.
"""

from collections.abc import Sequence

import numpy as np

from protocol.codecs import CODECS
from protocol.digest import Buffer
from protocol.wire import Payload, pack_frame


def aggregate(contributions: Sequence[tuple[Payload, int]], codec_name: str, *, zstd: bool) -> list[Buffer]:
    """Frames of the mean of (payload, tokens) pairs, weighted by tokens and encoded with `codec_name`.

        weight_w = fp32(tokens_w / Σ tokens) ;  acc ← 0 ;  acc ← acc + weight_w · Δ_w    for each w in the given order

    All payloads hold the same number of elements in chunks of the same size.
    """
    codec = CODECS[codec_name]
    total = sum(tokens for _, tokens in contributions)
    weights = [np.float32(tokens / total) for _, tokens in contributions]
    frames: list[Buffer] = []
    for index, n in enumerate(contributions[0][0].chunks):
        mean = np.zeros(n, np.float32)
        for (payload, _), weight in zip(contributions, weights, strict=True):
            payload.codec.accumulate(payload.chunk(index), weight, mean)
        raw = np.empty(codec.size(n), np.uint8)
        codec.encode(mean, raw)
        frames.append(pack_frame(raw, zstd=zstd))
    return frames
