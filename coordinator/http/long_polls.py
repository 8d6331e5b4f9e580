"""Long polls: with `Prefer: wait=SECONDS` (RFC 7240) the response waits until there is news."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import TypeVar
from urllib.request import parse_http_list

import anyio.to_thread
from fastapi import Request

from coordinator.http.middleware import REJECT_DELAY_S, add_response_header
from coordinator.quotas import caller_of
from coordinator.service import Coordinator
from coordinator.store.identity import Identity
from protocol.errors import Problem
from protocol.messages import Scope

MAX_WAIT_S = 60.0
Answer = TypeVar("Answer")


def preferred_wait_s(request: Request) -> float:
    """Return the requested wait in seconds, at most MAX_WAIT_S; 0 if none. Adds it to the response's headers."""
    for preference in parse_http_list(", ".join(request.headers.getlist("prefer"))):
        name, _, value = preference.partition(";")[0].partition("=")
        if name.strip().lower() == "wait":  # the first one counts (RFC 7240, section 2)
            seconds = re.fullmatch(r'([0-9]+)|"([0-9]+)"', value.strip())
            wait_s = 0.0 if seconds is None else min(float(seconds[1] or seconds[2]), MAX_WAIT_S)
            if wait_s:
                add_response_header(request, "Preference-Applied", f"wait={wait_s:.0f}")
            return wait_s
    return 0.0


async def poll(
    service: Coordinator,
    caller: Identity,
    run: str,
    topic: str,
    wait_s: float,
    from_memory: Callable[[], tuple[bool, Answer] | None],
    under_lock: Callable[[], tuple[bool, Answer]],
) -> Answer:
    """Check now, and at every wake-up of `topic`, until the result is (True, answer) or the time is up. Return the last
    answer.

    `under_lock` is called on a thread and returns the result. `from_memory` is called first, on the event loop. It
    returns the same result if that needs neither a lock nor the database; otherwise None.

    The caller's token is checked again before each call. Raises Problem if it is no longer valid, or if the caller has
    too many long polls. Members come first: other callers are woken one after another, and use the read threads.

    The wait is up to a fifth shorter than `wait_s`, so that clients that began to wait together do not all ask again at
    the same moment.
    """
    loop, waiters, is_member = asyncio.get_running_loop(), service.waiters, caller.member is not None
    until = loop.time() + wait_s * (1 - waiters.jitter() / 5)
    async with _counted(service, caller, run, topic, wait_s):
        while True:
            with waiters.register(run, topic, slowly=not is_member) as woken:
                service.check_still(caller)
                found = from_memory()
                if found is None and is_member:
                    found = await _ask_in_turn(service, from_memory, under_lock)
                elif found is None:
                    found = await anyio.to_thread.run_sync(under_lock, limiter=service.read_threads)
                final, answer = found
                remaining = until - loop.time()
                if final or remaining <= 0 or waiters.closed:
                    return answer
                try:
                    await asyncio.wait_for(woken.wait(), remaining)
                except TimeoutError:
                    return answer


@asynccontextmanager
async def _counted(service: Coordinator, caller: Identity, run: str, topic: str, wait_s: float) -> AsyncIterator[None]:
    """Count a long poll while the block runs. Members have a quota for each topic that they wait for; admins have
    none."""
    if not wait_s or caller.allows(Scope.ADMIN):
        yield
        return
    key = caller_of(caller) if caller.member is None else (caller_of(caller), run, topic)
    with ExitStack() as held:
        try:
            held.enter_context(service.quotas.poll(key))
        except Problem:
            await asyncio.sleep(REJECT_DELAY_S)
            raise
        yield


async def _ask_in_turn(
    service: Coordinator,
    from_memory: Callable[[], tuple[bool, Answer] | None],
    under_lock: Callable[[], tuple[bool, Answer]],
) -> tuple[bool, Answer]:
    """Call `under_lock`, for a few requests at a time. While a request waits for its turn, other requests often bring
    its answer into memory, so `from_memory` is called again first."""
    waiters = service.waiters
    async with waiters.reading:
        found = from_memory()
        if found is None:
            found = await anyio.to_thread.run_sync(under_lock, limiter=waiters.threads)
        return found
