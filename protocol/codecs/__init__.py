"""Codecs: how a chunk of fp32 values becomes bytes. Choose one from CODECS by its name.

The numpy versions in this package are the reference. Where there are compiled kernels they take its place for int8 and
int4, and `worker/codecs` produces the same bytes on the worker's device. A codec works on one chunk at a time, so that
everything around it streams in bounded memory.

Arithmetic is part of the format: every operation below is one fp32 operation rounded to nearest even, so that
all replicas decode the same bytes to the same values on any hardware.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import numpy.typing as npt

from protocol.codecs import bf16, fp32, int4, int8, sparse, ternary, two_bit
from protocol.compiled import COMPILED, kernels

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Codec:
    """One codec.

    size(n)                        exact number of bytes of n encoded elements
    encode(x, out)                 float32[n] -> uint8[size(n)]; CodecError for values it cannot carry
    decode(data, out)              uint8[size(n)] -> float32[n]
    accumulate(data, weight, acc)  acc += weight · decode(data), with the rounding that docs/wire-format.md gives
    check(data, n, limit)          WireError unless all n decoded values are finite and at most `limit` in magnitude
    error_feedback                 whether the worker carries over what the encoding left out: below 4 bits it must
    add_weight(data, weight, sum)  sum += weight at each index that was sent; None where every index always is
    step(data, θ, u, η, μ)         the outer step by the decoded values, in one pass; None without a kernel for it
    """

    name: str
    size: Callable[[int], int]
    encode: Callable[[F32, U8], None]
    decode: Callable[[U8, F32], None]
    accumulate: Callable[[U8, np.float32, F32], None]
    check: Callable[[U8, int, float], None]
    error_feedback: bool
    add_weight: Callable[[U8, np.float32, F32], None] | None
    step: Callable[[U8, F32, F32, float, float], None] | None = None


def _codec(
    module: ModuleType, *, error_feedback: bool = False, add_weight: Callable[[U8, np.float32, F32], None] | None = None
) -> Codec:
    functions = (module.size, module.encode, module.decode, module.accumulate, module.check)
    return Codec(module.NAME, *functions, error_feedback, add_weight)


REFERENCE: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        _codec(fp32),
        _codec(bf16),
        _codec(int8),
        _codec(int4),
        _codec(two_bit, error_feedback=True),
        _codec(ternary, error_feedback=True),
        _codec(sparse, error_feedback=True, add_weight=sparse.add_weight),
    )
}


def _compiled(codec: Codec) -> Codec:
    """The same by the compiled kernels."""

    operations = ("encode", "decode", "accumulate", "step")
    try_encode, decode, accumulate, step = (getattr(kernels, f"{codec.name}_{operation}") for operation in operations)

    def encode(x: F32, out: U8) -> None:
        if not try_encode(x, out):
            codec.encode(x, out)  # raises, and says why

    return replace(codec, encode=encode, decode=decode, accumulate=accumulate, step=step)


CODECS: dict[str, Codec] = dict(REFERENCE)
if COMPILED:
    CODECS |= {name: _compiled(REFERENCE[name]) for name in (int8.NAME, int4.NAME)}
