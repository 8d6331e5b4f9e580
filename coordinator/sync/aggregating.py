"""The mean of the contributions: payloads in, frames of a delta out. Pure arithmetic in bounded memory.

One chunk at a time: however many workers contribute, what is held is one fp32 chunk (two where a codec sends only some
of the values), one worker's encoded chunk and the encoded delta. The sum runs in worker-id order, never in order of
arrival, so the bytes do not depend on timing.
"""

from collections.abc import Sequence

import numpy as np

from protocol.codecs import CODECS, F32
from protocol.digest import Buffer
from protocol.wire import Payload, pack_frame


def aggregate(contributions: Sequence[tuple[Payload, int]], codec_name: str, *, zstd: bool) -> list[Buffer]:
    """Frames of the mean of (payload, tokens) pairs, weighted by tokens and encoded with `codec_name`.

        weight_w = fp32(tokens_w / Σ tokens) ;  acc ← 0 ;  acc ← acc + weight_w · Δ_w    for each w in the given order

    Where a codec sends only some of the values, the mean is over the workers that sent this one: with W the sum of
    their weights, in the same order, the accumulator becomes acc / W, or 0 where nobody sent any.

    All payloads hold the same number of elements in chunks of the same size and are of one codec.
    """
    codec = CODECS[codec_name]
    total = sum(tokens for _, tokens in contributions)
    weighted = [(payload, np.float32(tokens / total)) for payload, tokens in contributions]
    frames: list[Buffer] = []
    for index in range(len(contributions[0][0].chunks)):
        mean = mean_of_chunk(weighted, index)
        raw = np.empty(codec.size(len(mean)), np.uint8)
        codec.encode(mean, raw)
        frames.append(pack_frame(raw, zstd=zstd))
    return frames


def mean_of_chunk(weighted: Sequence[tuple[Payload, np.float32]], index: int) -> F32:
    """Of chunk `index` of (payload, weight) pairs."""
    first = weighted[0][0]
    mean = np.zeros(first.chunks[index], np.float32)
    if first.codec.add_weight is None:
        for payload, weight in weighted:
            payload.codec.accumulate(payload.chunk(index), weight, mean)
        return mean
    sent = np.zeros_like(mean)
    for payload, weight in weighted:
        chunk = payload.chunk(index)
        payload.codec.accumulate(chunk, weight, mean)
        first.codec.add_weight(chunk, weight, sent)
    return np.divide(mean, sent, out=mean, where=sent > 0)
