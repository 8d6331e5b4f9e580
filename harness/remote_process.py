"""The side of a process behind a line: it reads orders on stdin and writes answers to stdout, as JSON lines. remote.py
is the other side.

Times are of the machine's monotonic clock.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any


def orders() -> Iterator[dict[str, Any]]:
    """Yield the orders until stdin ends."""
    for line in sys.stdin:
        yield json.loads(line)


def answer(**fields: Any) -> None:
    """Write an answer."""
    print(json.dumps(fields), flush=True)


def timed(work: Callable[[], dict[str, Any] | None], soon: Callable[[], object] = lambda: None) -> None:
    """Do the work on the order `go`, together with the other processes, and call `soon` shortly before. Answer when it
    began and ended, and what it returned."""
    answer(at="ready")
    while sys.stdin.readline().strip() == "soon":
        soon()
    started = time.monotonic()
    found = work()
    answer(started=started, ended=time.monotonic(), **(found or {}))
