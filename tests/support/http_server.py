"""A server of one test's own, over a real socket: for lines that break and answers that lie."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """What the tests' handlers are made from: it logs nothing."""

    def created(self) -> None:
        """201, without a body."""
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


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
