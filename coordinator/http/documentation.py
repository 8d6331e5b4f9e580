"""The pages /docs and /redoc, which show the OpenAPI schema in a browser. Their scripts come with the coordinator."""

import base64
import hashlib
import re
from pathlib import Path

import fastapi_offline
from fastapi import FastAPI
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.staticfiles import StaticFiles
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import BaseRoute, Mount, Route

_STATIC = "/static-offline-docs"
_INLINE_SCRIPT = re.compile(rb"<script>(.*?)</script>", re.DOTALL)


def routes(app: FastAPI) -> list[BaseRoute]:
    """Return the routes of the two pages, and of the scripts and styles that they load."""

    async def swagger(request: Request) -> HTMLResponse:
        root = request.scope.get("root_path", "")
        page = get_swagger_ui_html(
            openapi_url=f"{root}{app.openapi_url}",
            title=f"{app.title}: Swagger UI",
            swagger_js_url=f"{root}{_STATIC}/swagger-ui-bundle.js",
            swagger_css_url=f"{root}{_STATIC}/swagger-ui.css",
            swagger_favicon_url=f"{root}{_STATIC}/favicon.png",
        )
        return _restricted(page)

    async def redoc(request: Request) -> HTMLResponse:
        root = request.scope.get("root_path", "")
        page = get_redoc_html(
            openapi_url=f"{root}{app.openapi_url}",
            title=f"{app.title}: ReDoc",
            redoc_js_url=f"{root}{_STATIC}/redoc.standalone.js",
            redoc_favicon_url=f"{root}{_STATIC}/favicon.png",
            with_google_fonts=False,
        )
        return _restricted(page)

    static = StaticFiles(directory=Path(fastapi_offline.__file__).parent / "static")
    return [Route("/docs", swagger), Route("/redoc", redoc), Mount(_STATIC, static)]


def _restricted(page: HTMLResponse) -> HTMLResponse:
    """Return the page with a policy: it loads and asks from here alone, and runs no inline script but its own."""
    digests = [hashlib.sha256(script).digest() for script in _INLINE_SCRIPT.findall(bytes(page.body))]
    own = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    policy = [
        "default-src 'none'",
        f"script-src 'self' {own}".rstrip(),
        "style-src 'self' 'unsafe-inline'",  # both libraries make style elements
        "img-src 'self' data:",
        "connect-src 'self'",
        "worker-src blob:",  # ReDoc's search
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    page.headers["Content-Security-Policy"] = "; ".join(policy)
    page.headers["Referrer-Policy"] = "no-referrer"
    return page
