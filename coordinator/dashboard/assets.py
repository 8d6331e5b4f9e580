"""The files of the page, as they are served: the page itself, its own files, and the library of its charts.

An address says what lies there: that of the page's own files has a digest of all of them, that of the library its
version. So both are kept by browsers for good, and an address in a newer page is another one.
"""

import gzip
import hashlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PAGE = Path(__file__).parent / "page"
CHARTS = "plotly"  # the package that brings the library, in a file of this name
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True)
class Asset:
    """A file as it is served; `lasting`: its address never has other bytes."""

    content: bytes
    media_type: str
    lasting: bool

    @cached_property
    def etag(self) -> str:
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    @cached_property
    def compressed(self) -> bytes:
        return gzip.compress(self.content, 6, mtime=0)


@cache
def page_files() -> dict[str, bytes]:
    """Return the files of the page, by name."""
    return {path.name: path.read_bytes() for path in sorted(PAGE.iterdir()) if path.suffix in TYPES}


@cache
def version() -> str:
    """Return what the address of the page's own files says of them."""
    summed = hashlib.sha256()
    for name, content in page_files().items():
        summed.update(f"{name} {len(content)}\n".encode() + content)
    return summed.hexdigest()[:16]


@cache
def charts_path() -> str:
    """Return the address of the library of charts, below that of the dashboard."""
    return f"{CHARTS}/{importlib.metadata.version(CHARTS)}/{CHARTS}.min.js"


@cache
def index() -> Asset:
    """Return the page, which names all else by its address."""
    files = f"dashboard/{version()}"
    # Else a browser finds out about each module from the one that imports it, one round trip after the other.
    modules = [f'<link rel="modulepreload" href="{files}/{name}">' for name in page_files() if name.endswith(".js")]
    text = page_files()["index.html"].decode()
    for name, value in {"files": files, "charts": f"dashboard/{charts_path()}", "modules": "\n".join(modules)}.items():
        text = text.replace(f"{{{name}}}", value)
    return Asset(text.encode(), TYPES[".html"], lasting=False)


@cache
def asset(path: str) -> Asset | None:
    """Return what lies at `path`, below the dashboard's address; None where nothing does."""
    if path == charts_path():
        return Asset(_charts(), TYPES[".js"], lasting=True)
    folder, _, name = path.rpartition("/")
    if folder != version() or name not in page_files() or name == "index.html":
        return None
    return Asset(page_files()[name], TYPES[Path(name).suffix], lasting=True)


def _charts() -> bytes:
    """Return the library of charts. The package is not imported, which would take a while."""
    found = importlib.util.find_spec(CHARTS)
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "package_data" / f"{CHARTS}.min.js").read_bytes()
