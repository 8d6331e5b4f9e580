"""Aggregation: payloads of contributions in, frames of a delta out. Pure arithmetic in bounded memory.

AGGREGATORS has the rules by the names that they have in run specs (`sync.aggregation`). However many workers
contribute, memory holds one fp32 chunk (two if the codec sends only some of the values), one worker's encoded chunk and
the encoded delta. The sum is in worker-id order, never in order of arrival, so the bytes do not depend on timing.
"""

from collections.abc import Callable, Sequence

import numpy as np

from protocol.codecs import CODECS, F32
from protocol.digest import Buffer
from protocol.wire import Payload, pack_frame

# One chunk of the contributions as (payload, weight) pairs in worker-id order, the chunk's index -> float32[elements].
# The weights are the workers' shares of all tokens.
Aggregator = Callable[[Sequence[tuple[Payload, np.float32]], int], F32]


def aggregate(
    contributions: Sequence[tuple[Payload, int]], codec_name: str, *, zstd: bool, rule: str = "mean"
) -> list[Buffer]:
    """Aggregate (payload, tokens) pairs by AGGREGATORS[rule]; return the result's frames, encoded with `codec_name`.

        weight_w = fp32(tokens_w / Σ tokens)

    All payloads hold the same number of elements in chunks of the same size and are of one codec.
    """
    codec, aggregator = CODECS[codec_name], AGGREGATORS[rule]
    total = sum(tokens for _, tokens in contributions)
    weighted = [(payload, np.float32(tokens / total)) for payload, tokens in contributions]
    frames: list[Buffer] = []
    for index in range(len(contributions[0][0].chunks)):
        chunk = aggregator(weighted, index)
        raw = np.empty(codec.size(len(chunk)), np.uint8)
        codec.encode(chunk, raw)
        frames.append(pack_frame(raw, zstd=zstd))
    return frames


def mean(weighted: Sequence[tuple[Payload, np.float32]], index: int) -> F32:
    """Return the weighted mean of chunk `index`, float32[elements].

        acc ← 0 ;  acc ← acc + weight_w · Δ_w    for each w in the given order

    If the codec sends only some of the values, the mean of a value is over the workers that sent it: with W the sum of
    their weights, in the same order, the result is acc / W, or 0 if nobody sent it.
    """
    first = weighted[0][0]
    acc = np.zeros(first.chunks[index], np.float32)
    if first.codec.add_weight is None:
        for payload, weight in weighted:
            payload.codec.accumulate(payload.chunk(index), weight, acc)
        return acc
    sent = np.zeros_like(acc)
    for payload, weight in weighted:
        chunk = payload.chunk(index)
        payload.codec.accumulate(chunk, weight, acc)
        first.codec.add_weight(chunk, weight, sent)
    return np.divide(acc, sent, out=acc, where=sent > 0)


AGGREGATORS: dict[str, Aggregator] = {"mean": mean}
