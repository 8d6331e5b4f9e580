"""The routes of the dashboard. They need no token, for there is nothing in them that is not in the package."""

import re

from fastapi.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from coordinator.dashboard import assets
from coordinator.dashboard.assets import Asset

# What a page from here may do: load from here, ask here. The library of charts sets the style of elements that it has
# made as an attribute; nothing that came from anybody else gets there.
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "style-src-attr 'unsafe-inline'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept, Accept-Encoding",
}
FOR_GOOD, ASK_AGAIN = "public, max-age=31536000, immutable", "no-cache"


def routes() -> list[BaseRoute]:
    """Return the routes of the dashboard."""
    return [Route("/", _page, methods=["GET"]), Route("/dashboard/{path:path}", _file, methods=["GET"])]


async def _page(request: Request) -> Response:
    """The page, for who takes one. Whoever asks for something else is told that there is nothing, as ever."""
    if not _takes_a_page(request.headers.get("accept", "*/*")):
        raise HTTPException(404)
    return await _answer(request, assets.index())


async def _file(request: Request) -> Response:
    found = await run_in_threadpool(assets.asset, request.path_params["path"])
    if found is None:
        raise HTTPException(404)
    return await _answer(request, found)


async def _answer(request: Request, asset: Asset) -> Response:
    headers = {**_HEADERS, "Cache-Control": FOR_GOOD if asset.lasting else ASK_AGAIN, "ETag": asset.etag}
    if asset.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    content = asset.content
    if _takes_gzip(request.headers.get("accept-encoding", "")):
        content = await run_in_threadpool(lambda: asset.compressed)  # the first time that takes a while
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type=asset.media_type)


def _takes_a_page(accept: str) -> bool:
    return "text/html" in accept or "*/*" in accept


def _takes_gzip(accepted: str) -> bool:
    return bool(re.search(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", accepted))
