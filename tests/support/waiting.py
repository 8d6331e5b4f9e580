"""Waiting for a condition of another process: by asking, never by guessing how long it takes."""

import time
from collections.abc import Callable

import httpx

from harness.patience import PATIENCE_S

__all__ = ["PATIENCE_S", "answers", "wait_until"]


def wait_until(condition: Callable[[], bool], *, patience_s: float = PATIENCE_S) -> None:
    """Ask until `condition` holds. The patience only turns a hang into a failure; no result depends on it."""
    give_up_at = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > give_up_at:
            raise AssertionError(f"{condition.__qualname__} did not come true in {patience_s:.0f} s")
        time.sleep(0.02)


def answers(client: httpx.Client, path: str) -> bool:
    """Whether a GET of `path` succeeds; not if nobody is there."""
    try:
        return client.get(path).is_success
    except httpx.TransportError:
        return False
