"""Long polls: `Prefer: wait=SECONDS` (RFC 7240) holds an answer back until there is something to say."""

import asyncio
import re
from collections.abc import Callable
from typing import TypeVar
from urllib.request import parse_http_list

import anyio.to_thread
from fastapi import Request

from coordinator.api.answer_headers import note_header
from coordinator.runs.bell import Bell

MAX_WAIT_S = 60.0
Answer = TypeVar("Answer")


def preferred_wait_s(request: Request) -> float:
    """The wait that the request asks for, at most MAX_WAIT_S; 0 where it asks for none. The answer will say so."""
    for preference in parse_http_list(", ".join(request.headers.getlist("prefer"))):
        name, _, value = preference.partition(";")[0].partition("=")
        if name.strip().lower() == "wait":  # the first one counts (RFC 7240, section 2)
            seconds = re.fullmatch(r'([0-9]+)|"([0-9]+)"', value.strip())
            wait_s = 0.0 if seconds is None else min(float(seconds[1] or seconds[2]), MAX_WAIT_S)
            if wait_s:
                note_header(request, "Preference-Applied", f"wait={wait_s:.0f}")
            return wait_s
    return 0.0


async def poll(
    bell: Bell,
    run: str,
    topic: str,
    wait_s: float,
    glance: Callable[[], tuple[bool, Answer] | None],
    look: Callable[[], tuple[bool, Answer]],
) -> Answer:
    """Look now and at every ring of `topic` until it is (True, answer) or the time is up; the last answer.

    `glance` is called on the event loop, and says the same as `look` where it can do so from memory and without a lock;
    only where it is None, `look` is called on a thread.

    The time is up to a fifth shorter than `wait_s`: those who were woken together do not ask again all at once.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_s * (1 - bell.spread() / 5)
    while True:
        with bell.listening(run, topic) as ring:
            settled, answer = glance() or await _look(bell, glance, look)
            remaining = until - loop.time()
            if settled or remaining <= 0 or bell.closed:
                return answer
            try:
                await asyncio.wait_for(ring.wait(), remaining)
            except TimeoutError:
                return answer


async def _look(
    bell: Bell, glance: Callable[[], tuple[bool, Answer] | None], look: Callable[[], tuple[bool, Answer]]
) -> tuple[bool, Answer]:
    """In turn. What those before have done often is for all: then a glance is enough after all."""
    async with bell.looks:
        found = glance()
        if found is None:
            found = await anyio.to_thread.run_sync(look, limiter=bell.threads)
        return found
