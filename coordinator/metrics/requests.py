"""Middleware that counts the requests, and logs each of them where everything is logged."""

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.http.head import wants_head_only
from coordinator.metrics.server import Meter
from protocol.text import printable

logger = logging.getLogger(__name__)

NO_ROUTE = "none"  # an address that there is not would be a label by anybody's choice
GONE = 499  # nobody was there to be answered


class Measure:
    """It sits around whatever may answer, faults included, and within what makes a GET of a HEAD."""

    def __init__(self, app: ASGIApp, meter: Meter) -> None:
        self._app, self._meter = app, meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), GONE

        async def send_and_look(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_look)
        finally:
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            method = "HEAD" if wants_head_only(scope) else scope["method"]
            seconds = time.perf_counter() - began
            self._meter.note(method, route, status, seconds)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s %s answered %d in %.3f s", method, printable(scope["path"]), status, seconds)
