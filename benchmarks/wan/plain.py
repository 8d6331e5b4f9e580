"""One plain TCP transfer on a new connection, up or down a line, of as many bytes as a sync has."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from harness.remote import Remote

PIECE_BYTES = 1 << 18
Direction = Literal["up", "down"]


def plain_s(worker: Remote, way: Direction, size: int) -> float:
    """Return the seconds from before the connection is opened until the last byte has arrived."""
    with socket.create_server((worker.line.address, 0)) as server, ThreadPoolExecutor(1) as pool:
        worker.order(do="plain", address=worker.line.address, port=server.getsockname()[1], way=way, size=size)
        worker.answer()
        serving = pool.submit(_serve, server, way, size)
        worker.go()
        answer, served_at = worker.answer(), serving.result()
    return (served_at if way == "up" else answer["ended"]) - answer["started"]


def transfer(address: str, port: int, way: Direction, size: int) -> None:
    """The remote end."""
    with socket.create_connection((address, port)) as connection:
        if way == "up":
            _send(connection, size)
            connection.recv(1)  # until everything has arrived
        else:
            _receive(connection, size)


def _serve(server: socket.socket, way: Direction, size: int) -> float:
    connection, _ = server.accept()
    with connection:
        if way == "up":
            _receive(connection, size)
            return time.monotonic()
        _send(connection, size)
        connection.recv(1)  # as above
    return time.monotonic()


def _send(connection: socket.socket, size: int) -> None:
    piece = bytes(PIECE_BYTES)
    for start in range(0, size, PIECE_BYTES):
        connection.sendall(piece[: size - start])


def _receive(connection: socket.socket, size: int) -> None:
    buffer = bytearray(PIECE_BYTES)
    while size > 0:
        if not (received := connection.recv_into(buffer)):
            raise ConnectionError(f"{size} bytes are missing")
        size -= received
