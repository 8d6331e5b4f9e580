"""Answers that are read from the database: made, JSON included, on a few threads that only read.

So whoever reads, however much and however often, takes neither the event loop nor the threads that uploads need. And
whoever says that an answer of some age will do (`Cache-Control: max-age=5`, RFC 9111 section 5.2.1.1) may get one that
was made for somebody else, with its `Age`.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import anyio.to_thread
from fastapi import Request, Response
from pydantic import BaseModel

from coordinator.service import Coordinator

Found = TypeVar("Found")
MAX_AGE_S = 60
_MAX_AGE = re.compile(r"(?i)(?:^|[\s,])max-age=(\d{1,9})(?:$|[\s,])")


async def read(service: Coordinator, report: Callable[[], Found]) -> Found:
    """Return what `report` finds, on one of those threads."""
    return await anyio.to_thread.run_sync(report, limiter=service.reading)


async def told(http: Request, report: Callable[..., BaseModel], *arguments: Any) -> Response:
    """Return `report(*arguments)` as an answer. Nothing else may be in it than what these say: it may be told again."""
    service: Coordinator = http.app.state.coordinator

    def tell() -> bytes:
        return report(*arguments).model_dump_json().encode()

    max_age_s = _max_age_s(http)
    if not max_age_s:
        return Response(await read(service, tell), media_type="application/json")
    content, age_s = await service.answers.read((report, *arguments), max_age_s, partial(read, service, tell))
    return Response(content, headers={"Age": str(math.ceil(age_s))}, media_type="application/json")


def _max_age_s(http: Request) -> int:
    """Return how old an answer may be, in seconds; 0: it is to be made anew."""
    found = _MAX_AGE.search(http.headers.get("cache-control", ""))
    return min(int(found[1]), MAX_AGE_S) if found else 0
