"""The log of a worker's process: to stderr, and to a file where one is named. Needs no torch, so that a worker's first
line comes before it is imported."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.text import PrintableFormatter

FORMAT = "%(asctime)s %(levelname)s %(message)s"


def log_to_stderr() -> None:
    """Log to stderr from now on, unless this process logs already. Of several processes of one worker, the first one
    reports on the worker; the others log warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter(FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if os.environ.get("RANK", "0") != "0":
        logging.getLogger().setLevel(logging.WARNING)


@contextmanager
def logged_to(path: Path | None) -> Iterator[None]:
    """Log to the file `path` too. Raises OSError."""
    if path is None:
        yield
        return
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(PrintableFormatter(FORMAT))
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        handler.close()
