"""The software of this box: versions, and the compiled kernels."""

import platform
from dataclasses import dataclass

import torch

from outerstep import __version__
from outerstep.doctor.finding import Finding, fine, warning
from protocol import PROTOCOL_VERSION
from protocol.compiled import COMPILED, KERNELS


@dataclass(frozen=True)
class Software:
    outerstep: str
    python: str
    torch: str
    compiled: bool
    kernels: str


def look() -> Software:
    return Software(__version__, platform.python_version(), torch.__version__, COMPILED, KERNELS)


def judge(seen: Software) -> list[Finding]:
    versions = fine(
        "versions", f"outerstep {seen.outerstep}, protocol {PROTOCOL_VERSION}, Python {seen.python}, torch {seen.torch}"
    )
    if seen.compiled:
        return [versions, fine("kernels", seen.kernels)]
    remedy = "install a C compiler and Python.h (gcc and python3-dev), then outerstep once more; the bits are the same"
    return [versions, warning("kernels", seen.kernels, remedy)]
