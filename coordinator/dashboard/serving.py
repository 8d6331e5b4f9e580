"""The dashboard's files, and the routes that serve them. They need no token, because all files are public parts of the
package.

The address of a page file contains a digest of all page files; the address of the charts library contains its version.
So browsers can cache both forever, and a newer page uses other addresses.
"""

import gzip
import hashlib
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

PAGE = Path(__file__).parent / "page"
CHARTS = "plotly"  # name of the charts library, and of the Python package that contains it
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# A page may load from this server only, and connect only to it. Inline styles are allowed, because the charts library
# sets style attributes on its elements; no foreign text gets into them.
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
CACHE_FOREVER, REVALIDATE = "public, max-age=31536000, immutable", "no-cache"


# --- the files --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asset:
    """A file as it is served. `immutable`: True if its address always has the same bytes."""

    content: bytes
    media_type: str
    immutable: bool

    @cached_property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    @cached_property
    def compressed(self) -> bytes:
        return gzip.compress(self.content, 6, mtime=0)


@cache
def page_files() -> dict[str, bytes]:
    """Return the page's files, by name."""
    return {path.name: path.read_bytes() for path in sorted(PAGE.iterdir()) if path.suffix in TYPES}


@cache
def version() -> str:
    """Return the digest of all page files, which is part of their address."""
    summed = hashlib.sha256()
    for name, content in page_files().items():
        summed.update(f"{name} {len(content)}\n".encode() + content)
    return summed.hexdigest()[:16]


@cache
def charts_path() -> str:
    """Return the path of the charts library, relative to /dashboard/."""
    return f"{CHARTS}/{importlib.metadata.version(CHARTS)}/{CHARTS}.min.js"


@cache
def index() -> Asset:
    """Return index.html with the addresses of all other files."""
    files = f"dashboard/{version()}"
    # Without preloading, a browser discovers modules one import after another, and each takes a round trip.
    modules = [f'<link rel="modulepreload" href="{files}/{name}">' for name in page_files() if name.endswith(".js")]
    text = page_files()["index.html"].decode()
    for name, value in {"files": files, "charts": f"dashboard/{charts_path()}", "modules": "\n".join(modules)}.items():
        text = text.replace(f"{{{name}}}", value)
    return Asset(text.encode(), TYPES[".html"], immutable=False)


@cache
def asset(path: str) -> Asset | None:
    """Return the file at `path`, relative to /dashboard/; None if there is none."""
    if path == charts_path():
        return Asset(_charts(), TYPES[".js"], immutable=True)
    folder, _, name = path.rpartition("/")
    if folder != version() or name not in page_files() or name == "index.html":
        return None
    return Asset(page_files()[name], TYPES[Path(name).suffix], immutable=True)


def _charts() -> bytes:
    """Return the charts library. Only its file is read, because importing its package would take a while."""
    found = importlib.util.find_spec(CHARTS)
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "package_data" / f"{CHARTS}.min.js").read_bytes()


# --- the routes -------------------------------------------------------------------------------------------------------


def routes() -> list[BaseRoute]:
    """Return the routes of the dashboard."""
    return [Route(path, _serve, methods=["GET"]) for path in ("/", "/dashboard/{path:path}")]


async def _serve(request: Request) -> Response:
    """Return the file; 404 if there is none, or if the client does not accept the page's HTML."""
    found = await file_at(request.scope["path"], request.headers)
    if found is None:
        raise HTTPException(404)
    return await response(request, found)


async def file_at(path: str, headers: Headers) -> Asset | None:
    """Return the file that a request with these headers gets; None if it gets none."""
    if path == "/":
        return index() if _accepts_html(headers.get("accept", "*/*")) else None
    if not path.startswith("/dashboard/"):
        return None
    return await run_in_threadpool(asset, path.removeprefix("/dashboard/"))


async def response(request: Request, found: Asset) -> Response:
    """Return the file as the client wants it: compressed, or not at all if it has it."""
    headers = {**_HEADERS, "Cache-Control": CACHE_FOREVER if found.immutable else REVALIDATE, "ETag": found.etag}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    content = found.content
    if _accepts_gzip(request.headers.get("accept-encoding", "")):
        content = await run_in_threadpool(lambda: found.compressed)  # slow at the first request, then cached
        headers["Content-Encoding"] = "gzip"
    return Response(content, headers=headers, media_type=found.media_type)


def _accepts_html(accept: str) -> bool:
    return "text/html" in accept or "*/*" in accept


def _accepts_gzip(accepted: str) -> bool:
    return bool(re.search(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", accepted))
