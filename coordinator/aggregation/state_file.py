"""One fragment's outer state in a file, stepped chunk by chunk, so a model never has to fit into memory.

The file is itself a payload of kind `state` with raw fp32 frames, θ then u, so a checkpoint can be served without
conversion.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from coordinator.aggregation.measuring import squares
from coordinator.store.blobs import Reader
from coordinator.store.payloads import StoredPayload
from outerstep.common.files import naming
from protocol.digest import StateHash
from protocol.errors import WireError, WireFault
from protocol.outer_step import outer_step_by
from protocol.spec.sections import OuterSpec
from protocol.wire import CHUNK_ELEMENTS, Payload, StateHeader, chunk_sizes, pack_header

F32 = npt.NDArray[np.float32]

BOUND = 65_504.0  # largest value of θ and u: fp16 cannot represent larger ones


class StateReader(StoredPayload):
    """A state that this coordinator wrote. Its frames are raw, so any range of elements can be read."""

    def __init__(self, reader: Reader) -> None:
        super().__init__(reader)
        self.elements = self.header.elements // 2
        start = self.offsets[0]
        if self.header.kind != "state" or self.total_bytes != start + 8 * self.elements:
            self.close()
            raise WireError(WireFault.HEADER, "the payload is not a state as this coordinator writes it")
        self._theta_at, self._momentum_at = start, start + 4 * self.elements

    def read(self, start: int, n: int) -> tuple[F32, F32]:
        """Return θ and u of elements [start, start + n), float32[n] each."""
        pair = np.empty((2, n), np.float32)
        for values, at in zip(pair, (self._theta_at, self._momentum_at), strict=True):
            got = self._reader.read_into(values.data.cast("B"), at + 4 * start)
            if got != values.nbytes:
                raise WireError(
                    WireFault.LENGTH, f"the state ends after {got} of {values.nbytes} bytes at element {start}"
                )
        return pair[0], pair[1]

    def read_chunks(self) -> Iterator[tuple[F32, F32]]:
        """Yield the whole state as chunks (θ, u)."""
        start = 0
        for n in chunk_sizes(self.elements, CHUNK_ELEMENTS):
            yield self.read(start, n)
            start += n

    def theta_norm(self) -> float:
        """Return the L2 norm of θ."""
        return math.sqrt(math.fsum(squares(theta) for theta, _ in self.read_chunks()))

    def state_digest(self) -> bytes:
        state_hash = StateHash()
        for theta, momentum in self.read_chunks():
            state_hash.update(theta.data, momentum.data)
        return state_hash.digest()


def write_state(
    path: Path, run: str, round_: int, fragment: int, elements: int, chunks: Iterator[tuple[F32, F32]]
) -> bytes:
    """Write a state file from its chunks (θ, u), replacing an older one. Return the state digest.

    If the older file has a second name, a checkpoint shares it: it is unlinked first, not overwritten.
    """
    frame_bytes = [4 * n for n in chunk_sizes(2 * elements, CHUNK_ELEMENTS)]
    head = pack_header(
        StateHeader(
            run=run,
            round=round_,
            fragment=fragment,
            codec="fp32",
            elements=2 * elements,
            chunk_elements=CHUNK_ELEMENTS,
            frame_bytes=frame_bytes,
        )
    )
    state_hash = StateHash()
    if path.exists() and path.stat().st_nlink > 1:
        path.unlink()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        with naming(path):
            _write_all(descriptor, memoryview(head), 0)
            theta_at = len(head)
            for theta, momentum in chunks:
                state_hash.update(theta.data, momentum.data)
                _write_all(descriptor, theta.data.cast("B"), theta_at)
                _write_all(descriptor, momentum.data.cast("B"), theta_at + 4 * elements)
                theta_at += theta.nbytes
            os.ftruncate(descriptor, theta_at + 4 * elements)
    finally:
        os.close(descriptor)
    return state_hash.digest()


def stepped(state: StateReader, delta: Payload, outer: OuterSpec) -> Iterator[tuple[F32, F32]]:
    """Yield the chunks (θ, u) of the state after the outer step with a published delta."""
    start = 0
    for index, n in enumerate(delta.chunks):
        theta, momentum = state.read(start, n)
        lr, beta = outer.learning_rate, outer.momentum
        outer_step_by(delta.codec, delta.chunk(index), theta, momentum, learning_rate=lr, beta=beta)
        yield theta, momentum
        start += n


@dataclass
class MaxMagnitude:
    """The largest magnitude among the values of a state; NaN if one of them is NaN."""

    largest: float = 0.0

    def watch(self, chunks: Iterator[tuple[F32, F32]]) -> Iterator[tuple[F32, F32]]:
        """Yield the chunks (θ, u) unchanged, and record their largest magnitude."""
        for chunk in chunks:
            for values in chunk:
                self.largest = float(np.maximum(self.largest, np.maximum(values.max(), -values.min())))
            yield chunk


def _write_all(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written
