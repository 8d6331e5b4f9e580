"""The FastAPI application: its routes and middleware, and the periodic tick."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool

from coordinator.api import checkpoints, events, rounds, runs, server, tokens, workers
from coordinator.api.metrics.server import RequestMetrics, ServerMetrics
from coordinator.dashboard import serving as dashboard
from coordinator.http import openapi
from coordinator.http.connection_limit import ConnectionLimit
from coordinator.http.middleware import Admit, PrepareRequest, ResponseHeaders
from coordinator.http.problems import answer_problems
from coordinator.http.response_cache import Caches
from coordinator.service import Coordinator
from protocol import __version__

TICK_S = 0.2


def create_app(coordinator: Coordinator, connections: ConnectionLimit | None = None) -> FastAPI:
    """Return the application around a coordinator. It closes the coordinator on shutdown. `connections`: the server's
    limit, for metrics and status."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        coordinator.waiters.attach(asyncio.get_running_loop())
        with coordinator.errors.collecting():
            ticking = asyncio.create_task(_tick(coordinator))
            yield
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
            await run_in_threadpool(coordinator.close)

    app = FastAPI(
        title="Outerstep coordinator",
        version=__version__,
        description="DiLoCo training over ordinary internet connections. docs/rest.md explains it. "
        "HEAD is answered wherever GET is.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # redirects would use the Host header, which the client controls
    )
    app.state.coordinator, app.state.connections = coordinator, connections
    app.state.caches = Caches(lambda: coordinator.clock())
    app.state.metrics = metrics = ServerMetrics(coordinator, connections)
    answer_problems(app)
    openapi.extend_schema(app)
    groups = runs, workers, rounds, checkpoints, events, tokens, server
    ours = [route for group in groups for route in group.router.routes]  # which several applications share
    app.router.routes += [*ours, *openapi.page_routes(app), *dashboard.routes()]
    # A request passes the last one added first.
    app.add_middleware(Admit)
    app.add_middleware(ResponseHeaders)
    app.add_middleware(RequestMetrics, metrics=metrics)
    app.add_middleware(PrepareRequest)
    return app


async def _tick(coordinator: Coordinator) -> None:
    while True:
        await run_in_threadpool(coordinator.tick)
        await asyncio.sleep(TICK_S)
