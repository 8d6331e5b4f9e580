"""Settings of the C library's heap, by which it retains freed memory: new pages cost several times what writing does.

By default glibc returns large blocks to the system as they are freed, and takes new ones for the next chunk or
fragment, whose pages are cleared one page fault at a time. Other C libraries have no such settings.
"""

import ctypes

# Of glibc's malloc.h.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, ARENA_MAX = -1, -2, -3, -8
ARENAS = 2
LARGEST_KEPT = 32 << 20  # the most that glibc takes; larger blocks are given back
NEVER = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Retain the memory that this process frees, for the next thread that allocates.

    Threads share two heaps: by default there are eight per core, and no thread uses what another heap has free.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(ARENA_MAX, ARENAS)
        set_option(MMAP_THRESHOLD, LARGEST_KEPT)
        set_option(TRIM_THRESHOLD, NEVER)
        set_option(TOP_PAD, LARGEST_KEPT)
