"""Answers that are read from the database: made, JSON included, on a few threads that only read.

So whoever reads, however much and however often, takes neither the event loop nor the threads that uploads need.
"""

from collections.abc import Callable
from typing import Any

import anyio.to_thread
from fastapi import Response
from pydantic import BaseModel

from coordinator.service import Coordinator


async def told(service: Coordinator, report: Callable[..., BaseModel], *arguments: Any, status: int = 200) -> Response:
    """Return `report(*arguments)` as an answer."""

    def tell() -> str:
        return report(*arguments).model_dump_json()

    content = await anyio.to_thread.run_sync(tell, limiter=service.reading)
    return Response(content, status, media_type="application/json")
