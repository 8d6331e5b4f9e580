"""Bodies as they arrive: one that stalls, or hardly moves, is given up."""

import asyncio
from collections.abc import AsyncIterator

from fastapi import Request

from coordinator.settings import Settings
from protocol.errors import Problem


class Pace:
    """The least pace of a body: so many bytes per second, in each span of `window_s` seconds that has passed. A line
    may be gone for most of a span, if it carries more for the rest of it."""

    def __init__(self, least_bytes_per_s: float, window_s: float, now: float) -> None:
        self._least_bytes, self._window_s = least_bytes_per_s * window_s, window_s
        self._since, self._arrived = now, 0

    def arrived(self, count: int, now: float) -> bool:
        """Note that so many bytes have arrived; return False if the span that has passed had too few."""
        self._arrived += count
        if now - self._since < self._window_s:
            return True
        enough = self._arrived >= self._least_bytes
        self._since, self._arrived = now, 0
        return enough


async def pieces(request: Request, settings: Settings) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Raises Problem `request-timeout` if nothing, or too little, arrives for
    `upload_idle_s`."""
    loop, idle_s, least = asyncio.get_running_loop(), settings.upload_idle_s, settings.min_body_bytes_per_s
    body, pace = request.stream(), Pace(least, idle_s, loop.time())
    while True:
        try:
            async with asyncio.timeout(idle_s):
                piece = await anext(body, None)
        except TimeoutError:
            raise Problem("request-timeout", f"nothing arrived for {idle_s:.0f} s; send it again") from None
        if not piece:
            return
        if not pace.arrived(len(piece), loop.time()):
            detail = f"fewer than {least:g} bytes per second arrived for {idle_s:.0f} s; send it again"
            raise Problem("request-timeout", detail)
        yield piece
