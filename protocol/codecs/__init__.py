"""Codecs: how a chunk of fp32 values becomes bytes. Choose one from CODECS by its name.

To add one, write `protocol/codecs/NAME.py` and add its line to _MODULES; then write its two functions in
`worker/codecs/torch_codecs.py` and add their line to IN_TORCH. The run spec, the wire format, the planner and the
generated pages all derive from the table here. FIGURES (for the planner), FOR_DELTAS and `add_weight` are optional in
a module.

The numpy versions in this package are the reference. Compiled kernels, if installed, replace them for int8 and int4;
`worker/codecs` produces the same bytes on the worker's device. A codec works on one chunk at a time, so everything
around it streams in bounded memory.

Arithmetic is part of the format: every operation below is one fp32 operation rounded to nearest even, so that
all replicas decode the same bytes to the same values on any hardware.
"""

from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from protocol.codecs.base import F32, U8, UNKNOWN, Codec
from protocol.compiled import COMPILED, kernels

# The modules of this package, in the order in which help texts list them.
_MODULES = (
    "fp32",
    "bf16",
    "int8",
    "int4",
    "two_bit",
    "ternary",
    "sparse",
)


def _codec(name: str) -> Codec:
    module: ModuleType = import_module(f"{__name__}.{name}")
    functions = (module.size, module.encode, module.decode, module.accumulate, module.check)
    for_deltas = getattr(module, "FOR_DELTAS", not module.ERROR_FEEDBACK)
    figures, add_weight = getattr(module, "FIGURES", UNKNOWN), getattr(module, "add_weight", None)
    return Codec(module.NAME, *functions, module.ERROR_FEEDBACK, for_deltas, figures, add_weight)


REFERENCE: dict[str, Codec] = {codec.name: codec for codec in map(_codec, _MODULES)}


def _compiled(codec: Codec) -> Codec:
    """Return the same codec, computed by the compiled kernels."""

    operations = ("encode", "decode", "accumulate", "step", "sketch")
    try_encode, *others = (getattr(kernels, f"{codec.name}_{operation}") for operation in operations)

    def encode(x: F32, out: U8) -> None:
        if not try_encode(x, out):
            codec.encode(x, out)  # raises CodecError

    return replace(codec, encode=encode, **dict(zip(operations[1:], others, strict=True)))


CODECS: dict[str, Codec] = {
    name: _compiled(codec) if COMPILED and hasattr(kernels, f"{name}_encode") else codec
    for name, codec in REFERENCE.items()
}

# For pydantic and typer. Type checkers cannot read a computed Literal.
if TYPE_CHECKING:
    CodecName = str
    DownloadCodecName = str
else:
    CodecName = Literal[tuple(CODECS)]
    DownloadCodecName = Literal[tuple(name for name, codec in CODECS.items() if codec.for_deltas)]
