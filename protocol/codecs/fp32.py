"""fp32: the unchanged values, little-endian. Lossless; for tests, references and checkpoints."""

import numpy as np

from protocol.codecs.base import F32, U8, Figures
from protocol.errors import CodecError, WireError, WireFault

NAME = "fp32"
ERROR_FEEDBACK = False
FIGURES = Figures(zstd=0.918, up=0.0, down=0.0, pack=0.15, unpack=0.26, accumulate=3.6)


def size(n: int) -> int:
    return 4 * n


def encode(x: F32, out: U8) -> None:
    if not np.isfinite(x).all():
        raise CodecError("fp32: the values contain NaN or infinity")
    out.view("<f4")[:] = x


def decode(data: U8, out: F32) -> None:
    out[:] = data.view("<f4")


def accumulate(data: U8, weight: np.float32, acc: F32) -> None:
    np.add(acc, data.view("<f4") * weight, out=acc)


def check(data: U8, n: int, limit: float) -> None:
    largest = np.abs(data.view("<f4")).max()  # NaN if any value is NaN
    if not largest <= limit:
        fault = WireFault.MAGNITUDE if np.isfinite(largest) else WireFault.CODES
        raise WireError(fault, f"{NAME}: a value has the magnitude {largest:g}, at most {limit:g} is allowed")
