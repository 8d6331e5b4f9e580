"""Codecs: how a chunk of fp32 values becomes bytes. Choose one from CODECS by its name.

To add one, write `protocol/codecs/NAME.py` and `worker/codecs/NAME.py`, and add its line to _MODULES. What the run spec
and the wire format allow, the worker's codecs, the planner and the generated pages all derive from this one table. Of a
module's names, FIGURES (the planner's) and `add_weight` are optional.

The numpy versions in this package are the reference. Compiled kernels, where installed, replace them for int8 and int4;
`worker/codecs` produces the same bytes on the worker's device. A codec works on one chunk at a time, so that
everything around it streams in bounded memory.

Arithmetic is part of the format: every operation below is one fp32 operation rounded to nearest even, so that
all replicas decode the same bytes to the same values on any hardware.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from protocol.codecs.figures import UNKNOWN, Figures
from protocol.compiled import COMPILED, kernels

# The modules here and in worker/codecs, in the order in which people are shown the choices.
_MODULES = (
    "fp32",
    "bf16",
    "int8",
    "int4",
    "two_bit",
    "ternary",
    "sparse",
)

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Codec:
    """A way of encoding fp32 values.

    name                           its name on the wire and in run specs
    module                         the name of its files, here and in worker/codecs
    size(n)                        exact number of bytes of n encoded elements
    encode(x, out)                 float32[n] -> uint8[size(n)]; CodecError for values it cannot carry
    decode(data, out)              uint8[size(n)] -> float32[n]
    accumulate(data, weight, acc)  acc += weight · decode(data), with the rounding that docs/wire-format.md gives
    check(data, n, limit)          WireError unless all n decoded values are finite and at most `limit` in magnitude
    error_feedback                 True if the worker carries over the encoding error, as it must below 4 bits
    figures                        measurements for the planner; UNKNOWN if there are none
    add_weight(data, weight, sum)  sum += weight at each index that was sent; None if every index is always sent
    step(data, θ, u, η, μ)         the outer step by the decoded values, in one pass; None without a kernel for it
    """

    name: str
    module: str
    size: Callable[[int], int]
    encode: Callable[[F32, U8], None]
    decode: Callable[[U8, F32], None]
    accumulate: Callable[[U8, np.float32, F32], None]
    check: Callable[[U8, int, float], None]
    error_feedback: bool
    figures: Figures
    add_weight: Callable[[U8, np.float32, F32], None] | None
    step: Callable[[U8, F32, F32, float, float], None] | None = None


def _codec(name: str) -> Codec:
    module: ModuleType = import_module(f"{__name__}.{name}")
    functions = (module.size, module.encode, module.decode, module.accumulate, module.check)
    figures, add_weight = getattr(module, "FIGURES", UNKNOWN), getattr(module, "add_weight", None)
    return Codec(module.NAME, name, *functions, module.ERROR_FEEDBACK, figures, add_weight)


REFERENCE: dict[str, Codec] = {codec.name: codec for codec in map(_codec, _MODULES)}


def _compiled(codec: Codec) -> Codec:
    """Return the same codec, computed by the compiled kernels."""

    operations = ("encode", "decode", "accumulate", "step")
    try_encode, decode, accumulate, step = (getattr(kernels, f"{codec.name}_{operation}") for operation in operations)

    def encode(x: F32, out: U8) -> None:
        if not try_encode(x, out):
            codec.encode(x, out)  # raises, and says why

    return replace(codec, encode=encode, decode=decode, accumulate=accumulate, step=step)


CODECS: dict[str, Codec] = {
    name: _compiled(codec) if COMPILED and hasattr(kernels, f"{name}_encode") else codec
    for name, codec in REFERENCE.items()
}

# Names as pydantic and typer want them; type checkers cannot read a Literal that is computed.
if TYPE_CHECKING:
    CodecName = str
    DownloadCodecName = str
else:
    CodecName = Literal[tuple(CODECS)]
    # Nothing carries over what the encoding of a delta leaves out: codecs that depend on that are for uploads only.
    DownloadCodecName = Literal[tuple(name for name, codec in CODECS.items() if not codec.error_feedback)]
