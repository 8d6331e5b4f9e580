"""One TCP transfer and nothing else: a new connection, and as many bytes as a sync has, up or down one line."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from harness.far import Far

PIECE_BYTES = 1 << 18
Direction = Literal["up", "down"]


def plain_s(worker: Far, way: Direction, size: int) -> float:
    """Return the seconds from before the connection until the other side has the last byte."""
    with socket.create_server((worker.line.address, 0)) as server, ThreadPoolExecutor(1) as pool:
        worker.order(do="plain", address=worker.line.address, port=server.getsockname()[1], way=way, size=size)
        worker.answer()
        serving = pool.submit(_serve, server, way, size)
        worker.go()
        answer, served_at = worker.answer(), serving.result()
    return (served_at if way == "up" else answer["ended"]) - answer["started"]


def transfer(address: str, port: int, way: Direction, size: int) -> None:
    """The far end of it."""
    with socket.create_connection((address, port)) as connection:
        if way == "up":
            _send(connection, size)
            connection.recv(1)  # until all of it is there
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
