"""The C library's heap, told to keep what is freed: new pages cost several times what it costs to write into them.

glibc gives large blocks back to the system as they are freed, and takes new ones for the next chunk or fragment, whose
pages are cleared one fault at a time. Other C libraries have no such settings.
"""

import ctypes

# Of glibc's malloc.h.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, ARENA_MAX = -1, -2, -3, -8
ARENAS = 2
LARGEST_KEPT = 32 << 20  # the most that glibc takes; larger blocks are given back
NEVER = (1 << 31) - 1


def keep_freed_memory() -> None:
    """What one thread of this process has freed serves the next that asks.

    Threads share two heaps: by default, each of eight threads per core has one of its own, of which others use nothing.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(ARENA_MAX, ARENAS)
        set_option(MMAP_THRESHOLD, LARGEST_KEPT)
        set_option(TRIM_THRESHOLD, NEVER)
        set_option(TOP_PAD, LARGEST_KEPT)
