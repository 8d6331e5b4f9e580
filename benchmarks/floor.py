"""The floor of a sync: each indispensable part alone, at this machine's full speed.

Without HTTP, database or waiting, and with one call from the interpreter per chunk. `benchmarks/sync.py` prints it next
to the sync."""

import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from blake3 import blake3

from outerstep.common.files import aligned, write_new
from protocol.codecs import CODECS
from protocol.outer_step import outer_step_by
from protocol.wire import CHUNK_ELEMENTS

PIECE_BYTES = 1 << 20
FILE_BYTES = 8 << 20


def core_seconds(elements: int, workers: int) -> dict[str, float]:
    """Return the core-seconds of one sync of `workers` × `elements`, int8 both ways, over workers and coordinator.

    encode       every worker's pseudo-gradient, and the mean
    average      every worker's payload, decoded and added
    outer step   on every worker, with decoding
    digests      of uploads by sender and receiver, of the delta by coordinator and workers
    sockets      all payloads through TCP on loopback, both ends
    disk         uploads and delta, not through the page cache, with fsync
    """
    codec, chunks = CODECS["int8"], range(0, elements, CHUNK_ELEMENTS)
    x = np.random.default_rng(0).standard_normal(elements, np.float32)
    theta, momentum = np.zeros_like(x), np.zeros_like(x)
    payload = [np.zeros(codec.size(len(x[at : at + CHUNK_ELEMENTS])), np.uint8) for at in chunks]
    wire = np.concatenate(payload)
    mean, weight = np.zeros(CHUNK_ELEMENTS, np.float32), np.float32(1 / workers)

    def encode() -> None:
        for raw, at in zip(payload, chunks, strict=True):
            codec.encode(x[at : at + CHUNK_ELEMENTS], raw)

    def average() -> None:
        for raw, at in zip(payload, chunks, strict=True):
            codec.accumulate(raw, weight, mean[: len(x[at : at + CHUNK_ELEMENTS])])

    def step() -> None:
        for raw, at in zip(payload, chunks, strict=True):
            part = slice(at, at + CHUNK_ELEMENTS)
            outer_step_by(codec, raw, theta[part], momentum[part], learning_rate=0.7, beta=0.9)

    encode()  # the other parts read the result
    return {
        "encode": _cpu_s(encode) * (workers + 1),
        "average": _cpu_s(average) * workers,
        "outer step": _cpu_s(step) * workers,
        "digests": _cpu_s(lambda: blake3(wire.data).digest()) * (3 * workers + 1),
        "sockets": _cpu_s(lambda: _through_loopback(wire)) * 2 * workers,
        "disk": _cpu_s(lambda: _to_disk(wire)) * (workers + 1),
    }


def _cpu_s(act: Callable[[], object]) -> float:
    """Return the least CPU time of three calls, in seconds."""

    def once() -> float:
        before = time.process_time()
        act()
        return time.process_time() - before

    return min(once() for _ in range(3))


def _through_loopback(wire: np.ndarray) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sending:
        receiving, _ = server.accept()

        def receive() -> None:
            memory, left = bytearray(PIECE_BYTES), len(wire)
            while left:
                left -= receiving.recv_into(memory)

        with receiving:
            thread = threading.Thread(target=receive)
            thread.start()
            for at in range(0, len(wire), PIECE_BYTES):
                sending.sendall(wire[at : at + PIECE_BYTES].data)
            thread.join()


def _to_disk(wire: np.ndarray) -> None:
    memory = aligned(FILE_BYTES)
    with tempfile.TemporaryDirectory(prefix="outerstep-floor-") as folder:
        for number, at in enumerate(range(0, len(wire), FILE_BYTES)):
            path = Path(folder) / str(number)
            write_new(path, memory[: len(wire[at : at + FILE_BYTES])])
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
