"""Optimisations, which change no result: reused host memory, a side stream on a GPU, zstd only where it pays."""
