"""The pages /docs and /redoc, which show the OpenAPI schema in a browser. Their scripts come with the coordinator."""

import base64
import hashlib
import re
from collections.abc import Callable
from functools import partial
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

    def page(path: str, name: str, html: Callable[..., HTMLResponse], **files: str) -> Route:
        async def answer(request: Request) -> HTMLResponse:
            root = request.scope.get("root_path", "")
            urls = {key: f"{root}{_STATIC}/{file}" for key, file in files.items()}
            return _restricted(html(openapi_url=f"{root}{app.openapi_url}", title=f"{app.title}: {name}", **urls))

        return Route(path, answer)

    swagger = {"swagger_js_url": "swagger-ui-bundle.js", "swagger_css_url": "swagger-ui.css"}
    redoc = partial(get_redoc_html, with_google_fonts=False)
    return [
        page("/docs", "Swagger UI", get_swagger_ui_html, **swagger, swagger_favicon_url="favicon.png"),
        page("/redoc", "ReDoc", redoc, redoc_js_url="redoc.standalone.js", redoc_favicon_url="favicon.png"),
        Mount(_STATIC, StaticFiles(directory=Path(fastapi_offline.__file__).parent / "static")),
    ]


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
