"""A server of one test's own, over a real socket: for lines that break and answers that lie."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """What the tests' handlers are made from: it logs nothing."""

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        """Answer with the body and its length, unless the headers name another."""
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def created(self) -> None:
        """201, without a body."""
        self.answer(201)

    def log_message(self, *_: object) -> None:
        pass


def answering(status: int, body: bytes, kind: str = "text/html") -> type[Handler]:
    """A server that has the same answer to every GET."""

    class Answering(Handler):
        def do_GET(self) -> None:
            self.answer(status, body, {"Content-Type": kind})

    return Answering


class Server(ThreadingHTTPServer):
    request_queue_size = 256  # with the usual 5, a connection of many at once is repeated a second later


@contextmanager
def serving(handler: type[Handler]) -> Iterator[str]:
    """Serve on a free port of this machine; the URL."""
    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
