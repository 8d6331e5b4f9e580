"""Optimisations that change no result: a side stream on a GPU, zstd only where it pays off."""
