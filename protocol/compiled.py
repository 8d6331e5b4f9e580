"""The compiled kernels (`kernels.c`); None if they were not built.

They are not built if there was no C compiler or no Python.h at installation. numpy then computes the same bits, several
times slower.
"""

try:
    import protocol.kernels as kernels

    COMPILED = True
    KERNELS = f"compiled, for {kernels.generations()[0]}"
except ModuleNotFoundError:  # a file that exists but cannot be loaded is an error
    kernels = None  # type: ignore[assignment]
    COMPILED = False
    KERNELS = "none (no C compiler or no Python.h at installation): numpy is several times slower"

__all__ = ["COMPILED", "KERNELS", "kernels"]
