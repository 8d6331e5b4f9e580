"""Measurements of a codec, for `outerstep plan`. docs/performance.md says how each was made."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """The measurements of one codec.

    zstd                       bytes after zstd level 1 as a share of those before, of real pseudo-gradients
    up, down                   loss above fp32's, nats per byte, as upload and as download codec; None: not measured
    pack, unpack, accumulate   10^9 elements per second on one core
    """

    zstd: float
    up: float | None
    down: float | None
    pack: float
    unpack: float
    accumulate: float


UNKNOWN = Figures(zstd=1.0, up=None, down=None, pack=0.1, unpack=0.1, accumulate=0.5)
