"""What the coordinator's OpenAPI schema says of a request."""

import re
from functools import cache
from typing import Any, cast

import httpx

from coordinator.api.app import create_app
from coordinator.service import Coordinator


@cache
def schema() -> dict[str, Any]:
    """The schema, which no coordinator need run for."""
    return create_app(cast(Coordinator, None)).openapi()


def operation(method: str, path: str) -> dict[str, Any] | None:
    """What is said of this method, HEAD being GET, at this address; None where there is no such operation."""
    wanted = "get" if method == "HEAD" else method.lower()
    for address, methods in schema()["paths"].items():
        if wanted in methods and re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", address), path):
            return cast(dict[str, Any], methods[wanted])
    return None


def problems_of(operation: dict[str, Any], status: int) -> set[str]:
    """The problems that an operation may answer with, by name."""
    return set(re.findall(r"`([a-z-]+)`:", operation["responses"].get(str(status), {}).get("description", "")))


def check_declared(reply: httpx.Response, slug: str) -> None:
    """Fail unless the operation that refused a request says that it may."""
    found = operation(reply.request.method, reply.request.url.path)
    if found is None:
        return
    assert slug in problems_of(found, reply.status_code), (reply.request.method, reply.request.url.path)
