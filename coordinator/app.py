"""The FastAPI application: routes, middleware, and the tick a few times a second."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool

from coordinator.api import checkpoints, events, health, line_check, metrics, rounds, runs, status, tokens, workers
from coordinator.dashboard import serving as dashboard
from coordinator.http import documentation
from coordinator.http.answer_headers import AnswerHeaders
from coordinator.http.authentication import Authenticate
from coordinator.http.describing import describe
from coordinator.http.gate import Gate
from coordinator.http.head import AnswerHead
from coordinator.http.problems import answer_problems
from coordinator.http.request_ids import Identify
from coordinator.http.tracing import TELEMETRY, TellTrace
from coordinator.http.versions import CheckProtocol
from coordinator.metrics.requests import Measure
from coordinator.metrics.server import Meter
from coordinator.service import Coordinator
from outerstep.common import tracing
from protocol import __version__

TICK_S = 0.2
SEND_S = 1.0  # between two looks into the outbox

logger = logging.getLogger(__name__)


def create_app(coordinator: Coordinator, gate: Gate | None = None) -> FastAPI:
    """Return the application around a coordinator, which it closes when it shuts down. `gate`: its server's."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        coordinator.waiters.attach(asyncio.get_running_loop())
        logging.getLogger().addHandler(coordinator.errors)
        tasks = [asyncio.create_task(_tick(coordinator)), asyncio.create_task(_notify(coordinator))]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await run_in_threadpool(coordinator.close)
        logging.getLogger().removeHandler(coordinator.errors)

    app = FastAPI(
        title="Outerstep coordinator",
        version=__version__,
        description="One DiLoCo run over ordinary internet lines. docs/rest.md explains it. "
        "HEAD is answered wherever GET is.",
        lifespan=lifespan,
        telemetry=TELEMETRY,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the library makes its redirects of the Host header, which is the client's
    )
    app.state.coordinator, app.state.gate = coordinator, gate
    app.state.meter = meter = Meter(coordinator, gate)
    answer_problems(app)
    describe(app)
    for group in (runs, workers, rounds, checkpoints, events, tokens, line_check, health, status, metrics):
        app.include_router(group.router)
    app.router.routes += [*documentation.routes(app), *dashboard.routes()]
    if tracing.is_on():
        app.add_middleware(TellTrace)
    app.add_middleware(Authenticate)
    app.add_middleware(CheckProtocol)
    app.add_middleware(AnswerHeaders)
    app.add_middleware(Measure, meter=meter)
    app.add_middleware(Identify)
    app.add_middleware(AnswerHead)
    return app


async def _tick(coordinator: Coordinator) -> None:
    while True:
        await run_in_threadpool(coordinator.tick)
        await asyncio.sleep(TICK_S)


async def _notify(coordinator: Coordinator) -> None:
    while coordinator.sender is not None:
        try:
            await coordinator.sender.deliver_due()
        except Exception:  # nobody awaits it; the notification stays in the outbox
            logger.exception("the sending of notifications failed")
        await asyncio.sleep(SEND_S)
