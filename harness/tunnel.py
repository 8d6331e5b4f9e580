"""A TCP port in front of another one, which a test can cut, freeze, or let lose one answer."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

BUFFER = 1 << 16


def accept_each(listening: socket.socket, serve: Callable[[socket.socket], object]) -> None:
    """Call `serve` with each connection, on a thread of its own, until `listening` is closed."""
    while True:
        try:
            client, _ = listening.accept()
        except OSError:
            return
        threading.Thread(target=serve, args=(client,), daemon=True).start()


class Tunnel:
    """Passes connections to `port` on. Thread-safe."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port: int = self._listening.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._whole = threading.Event()  # cleared while it is frozen
        self._whole.set()
        self._is_cut = False
        self._lose_after: list[bytes] = []
        self.lost = threading.Event()
        self.passed_bytes = 0  # both ways; other threads may be about to add to it
        threading.Thread(target=accept_each, args=(self._listening, self._serve), daemon=True).start()

    def cut(self) -> None:
        """Close all connections, and each new one at once."""
        self._is_cut = True
        self._close_all()

    def freeze(self) -> None:
        """Pass nothing on any more. Connections stay open, as if the other machine was unplugged."""
        self._whole.clear()

    def mend(self) -> None:
        self._is_cut = False
        self._whole.set()

    def lose_answer_after(self, *texts: bytes) -> None:
        """Once requests have contained each of `texts`, in this order, close the connection instead of passing on the
        answer to the last one. Then `lost` is set."""
        self.lost.clear()
        self._lose_after = list(texts)

    def close(self) -> None:
        self._listening.close()
        self.cut()
        self._whole.set()

    def _close_all(self) -> None:
        with self._lock:
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _serve(self, client: socket.socket) -> None:
        if self._is_cut:
            client.close()
            return
        with client, suppress(OSError), socket.create_connection(("127.0.0.1", self._target)) as server:
            losing = threading.Event()
            with self._lock:
                self._open |= {client, server}
            back = threading.Thread(target=self._pass_on, args=(server, client, losing, False), daemon=True)
            back.start()
            self._pass_on(client, server, losing, True)
            back.join()
            with self._lock:
                self._open -= {client, server}

    def _pass_on(self, source: socket.socket, target: socket.socket, losing: threading.Event, is_request: bool) -> None:
        with suppress(OSError):
            while data := source.recv(BUFFER):
                self._whole.wait()
                if is_request and self._lose_after and self._lose_after[0] in data:
                    if not self._lose_after[1:]:
                        losing.set()
                    self._lose_after = self._lose_after[1:]
                elif not is_request and losing.is_set():
                    self.lost.set()
                    break  # the answer is not passed on
                target.sendall(data)
                self.passed_bytes += len(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def tunnel(port: int) -> Iterator[Tunnel]:
    """A tunnel that is closed at the end of the block."""
    made = Tunnel(port)
    try:
        yield made
    finally:
        made.close()
