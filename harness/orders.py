"""What a process behind a line is told, and tells: JSON lines on stdin and on stdout; far.py has the other side.

Times are of the machine's monotonic clock. Of the standard library alone, for it runs in the peers' environments too.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any


def orders() -> Iterator[dict[str, Any]]:
    """Yield what there is to do, until nobody gives orders any more."""
    for line in sys.stdin:
        yield json.loads(line)


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def timed(work: Callable[[], dict[str, Any] | None], soon: Callable[[], object] = lambda: None) -> None:
    """Do the work when told to, together with the others; `soon` when it is near. Tell when it began and ended, and
    what it returned."""
    say(at="ready")
    while sys.stdin.readline().strip() == "soon":
        soon()
    started = time.monotonic()
    found = work()
    say(started=started, ended=time.monotonic(), **(found or {}))


def stay() -> None:
    """Return when there are no more orders: others may still need this process."""
    sys.stdin.read()
