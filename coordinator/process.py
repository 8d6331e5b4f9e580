"""What coordinators and aggregators have in common as processes: logging, open files, and how memory is kept."""

import ctypes
import logging
import resource
from pathlib import Path

from coordinator.logs import FORMATS

logger = logging.getLogger(__name__)


def start_logging(level: str, format_: str, file: Path | None) -> None:
    """Log to stderr, and to `file` if there is one."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if file is not None:
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(FORMATS[format_]())
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)
    for talkative in ("alembic", "httpx"):  # a line per migration, and per forwarded request
        logging.getLogger(talkative).setLevel(logging.WARNING)


def allow_open_files() -> None:
    """Raise the limit on open files as far as the system allows. Every transfer needs a socket, and averaging a
    fragment keeps every contributor's file open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # macOS reports "unlimited" and then rejects it
        logger.warning("cannot raise the limit on open files above %d: %s", soft, error)


# Options of glibc's mallopt (malloc.h).
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, ARENA_MAX = -1, -2, -3, -8
ARENAS = 2
LARGEST_KEPT = 32 << 20  # the most that glibc allows; larger blocks are returned to the system
NEVER = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Make the C library keep the memory that this process frees, for the next thread that allocates.

    By default glibc returns large blocks to the system when they are freed, and maps new ones for the next chunk or
    fragment. Mapping costs several times as much as writing to the memory, because each page is cleared by a page
    fault. With these options, threads also share two heaps instead of eight per core, so a thread can use memory that
    another has freed. Other C libraries have no such options.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(ARENA_MAX, ARENAS)
        set_option(MMAP_THRESHOLD, LARGEST_KEPT)
        set_option(TRIM_THRESHOLD, NEVER)
        set_option(TOP_PAD, LARGEST_KEPT)
