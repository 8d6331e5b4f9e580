"""The compiled kernels (`kernels.c`), or None where this installation has none.

It has none if there was no C compiler, or no Python.h, when it was installed. Then numpy computes the same bits, and
takes several times as long.
"""

try:
    import protocol.kernels as kernels

    COMPILED = True
    KERNELS = f"compiled, for {kernels.generations()[0]}"
except ModuleNotFoundError:  # a file that is there and cannot be loaded is an error, and its reason is told
    kernels = None  # type: ignore[assignment]
    COMPILED = False
    KERNELS = "none, as there was no C compiler or no Python.h at installation: numpy takes several times as long"

__all__ = ["COMPILED", "KERNELS", "kernels"]
