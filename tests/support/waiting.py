"""Waiting for a condition of another process: by asking, never by guessing how long it takes."""

import time
from collections.abc import Callable

from harness.patience import PATIENCE_S

__all__ = ["PATIENCE_S", "wait_until"]


def wait_until(condition: Callable[[], bool], *, patience_s: float = PATIENCE_S) -> None:
    """Ask until `condition` holds. The patience only turns a hang into a failure; no result depends on it."""
    give_up_at = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > give_up_at:
            raise AssertionError(f"{condition.__qualname__} did not come true in {patience_s:.0f} s")
        time.sleep(0.02)
