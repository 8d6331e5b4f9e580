"""A server of files over a real socket, which knows ranges and breaks as a test says."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.http_server import Handler, serving

# Says what becomes of a request for a file: None, it is answered; a status; or how many bytes of the answer are sent
# before the connection ends, as a negative number.
Fault = Callable[[str], int | None]


class FileServer:
    """`files` by path. `asked` has the path and the range of every request, `authorizations` their tokens."""

    def __init__(self, files: dict[str, bytes], *, ranges: bool = True) -> None:
        self.files, self.ranges = files, ranges
        self.asked: list[tuple[str, str | None]] = []
        self.authorizations: list[str | None] = []
        self.fault: Fault = lambda path: None
        self.before: Callable[[str], None] = lambda path: None  # an answer begins

    def count(self, path: str) -> int:
        """How often a file was asked for."""
        return sum(asked == path for asked, _ in self.asked)

    def answer(self, handler: Handler) -> None:
        path, wanted = handler.path, handler.headers.get("Range")
        self.asked.append((path, wanted))
        self.authorizations.append(handler.headers.get("Authorization"))
        self.before(path)
        fault, content = self.fault(path), self.files.get(path)
        if content is None or (fault is not None and fault > 0):
            self._refuse(handler, fault or 404)
            return
        start, stop = 0, len(content)
        if wanted and self.ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1, len(content))
            if start >= len(content):
                self._refuse(handler, 416)
                return
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        else:
            handler.send_response(200)
        body = content[start:stop]
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("ETag", '"1"')
        handler.send_header("Last-Modified", "Sun, 22 Nov 2026 00:00:00 GMT")
        handler.end_headers()
        handler.wfile.write(body if fault is None else body[:-fault])

    @staticmethod
    def _refuse(handler: Handler, status: int) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", "0")
        handler.end_headers()


@contextmanager
def file_server(server: FileServer) -> Iterator[str]:
    """Serve; the URL."""

    class Files(Handler):
        def do_GET(self) -> None:  # noqa: N802
            server.answer(self)

        def do_HEAD(self) -> None:  # noqa: N802
            content = server.files.get(self.path)
            self.send_response(200 if content is not None else 404)
            self.send_header("Content-Length", str(len(content or b"")))
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Sun, 22 Nov 2026 00:00:00 GMT")
            self.end_headers()

    with serving(Files) as url:
        yield url
