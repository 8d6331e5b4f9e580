"""The mean: payloads of contributions in, frames of a delta out. Pure arithmetic in bounded memory.

`aggregation/judging.py` decides beforehand what is left out. Memory holds one fp32 chunk (two if the codec sends only
some of the values), one worker's encoded chunk and the encoded delta, and with error feedback two bytes per value for
residuals, however many workers contribute. The sum is in worker-id order, never in order of arrival, so the bytes do
not depend on timing.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from coordinator.aggregation.residual import Residual
from protocol.codecs import CODECS
from protocol.codecs.base import F32, Codec
from protocol.digest import Buffer
from protocol.wire import CHUNK_ELEMENTS, Payload, pack_frame


class Weighted(NamedTuple):
    """A contribution, its share of all tokens, and its weight: the share times the factor of its verdict."""

    payload: Payload
    share: np.float32
    weight: np.float32


def aggregate(
    contributions: Sequence[tuple[Payload, int]],
    codec_name: str,
    *,
    zstd: bool,
    factors: Sequence[float] | None = None,
    residual: Residual | None = None,
    check: Callable[[], object] = lambda: None,
) -> list[Buffer]:
    """Average (payload, tokens) pairs. Return the frames of their mean, encoded with `codec_name`. `factors` multiply
    the weights, each in (0, 1]; None: all 1. `residual`: of the result, for error feedback; None: without. `check` is
    called before each chunk, and may raise to end the work.

        share_w = fp32(tokens_w / Σ tokens) ;  weight_w = fp32(tokens_w / Σ tokens · factor_w)

    All payloads have the same number of elements, chunk size and codec.
    """
    codec = CODECS[codec_name]
    frames: list[Buffer] = []
    for index, chunk in enumerate(aggregated(contributions, factors)):
        check()
        frames.append(_frame(chunk, index, codec, residual, zstd=zstd))
    return frames


def aggregated(contributions: Sequence[tuple[Payload, int]], factors: Sequence[float] | None = None) -> Iterator[F32]:
    """Yield the chunks of the mean of the contributions, float32[elements], before they are encoded; see
    `aggregate`."""
    total = sum(tokens for _, tokens in contributions)
    weighted = [
        Weighted(payload, np.float32(tokens / total), np.float32(tokens / total * factor))
        for (payload, tokens), factor in zip(contributions, factors or [1.0] * len(contributions), strict=True)
    ]
    for index in range(len(weighted[0].payload.chunks)):
        yield mean(weighted, index)


def encoded(values: F32, codec_name: str, residual: Residual | None = None, *, zstd: bool) -> list[Buffer]:
    """Return the frames of an aggregated fragment that is in memory, float32[elements], like `aggregate`. `values` may
    be overwritten."""
    codec = CODECS[codec_name]
    chunks = (values[start : start + CHUNK_ELEMENTS] for start in range(0, len(values), CHUNK_ELEMENTS))
    return [_frame(chunk, index, codec, residual, zstd=zstd) for index, chunk in enumerate(chunks)]


def _frame(chunk: F32, index: int, codec: Codec, residual: Residual | None, *, zstd: bool) -> Buffer:
    if residual is not None:
        residual.add(chunk, index)
    raw = np.empty(codec.size(len(chunk)), np.uint8)
    codec.encode(chunk, raw)
    if residual is not None:
        decoded = np.empty_like(chunk)
        codec.decode(raw, decoded)
        residual.keep(chunk, decoded, index)
    return pack_frame(raw, zstd=zstd)


def mean(weighted: Sequence[Weighted], index: int) -> F32:
    """Return the weighted mean of chunk `index`, float32[elements].

        acc ← 0 ;  acc ← acc + weight_w · Δ_w    for each w in the given order

    If the codec sends only some of the values, each value is averaged over the workers that sent it: the result is acc
    / W, where W is the sum of their shares in the same order, or 0 if no worker sent it.
    """
    first = weighted[0].payload
    acc = np.zeros(first.chunks[index], np.float32)
    if first.codec.add_weight is None:
        for payload, _, weight in weighted:
            payload.codec.accumulate(payload.chunk(index), weight, acc)
        return acc
    sent = np.zeros_like(acc)
    for payload, share, weight in weighted:
        chunk = payload.chunk(index)
        payload.codec.accumulate(chunk, weight, acc)
        first.codec.add_weight(chunk, share, sent)
    return np.divide(acc, sent, out=acc, where=sent > 0)
