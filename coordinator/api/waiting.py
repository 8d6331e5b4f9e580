"""Long polls: `Prefer: wait=SECONDS` (RFC 7240) holds an answer back until there is something to say."""

import asyncio
import re
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from coordinator.bell import Bell

MAX_WAIT_S = 60.0
Answer = TypeVar("Answer")


def preferred_wait_s(request: Request) -> float:
    """The wait that the request asks for; 0 where it asks for none."""
    match = re.search(r"\bwait=(\d{1,6})\b", request.headers.get("prefer", ""))
    return min(float(match[1]), MAX_WAIT_S) if match else 0.0


async def poll(bell: Bell, run: str, wait_s: float, look: Callable[[], tuple[bool, Answer]]) -> Answer:
    """Call `look` now and at every ring until it says (True, answer) or the time is up; the last answer."""
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_s
    while True:
        ring = bell.next_ring(run)
        settled, answer = await run_in_threadpool(look)
        remaining = until - loop.time()
        if settled or remaining <= 0 or bell.closed:
            return answer
        try:
            await asyncio.wait_for(ring.wait(), remaining)
        except TimeoutError:
            continue  # look once more, then answer
