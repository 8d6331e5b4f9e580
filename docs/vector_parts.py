"""Values and payloads for the test vectors."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from docs.zstd_frames import zstd_frame
from protocol import wire
from protocol.codecs import REFERENCE
from protocol.digest import Buffer, StateHash

F32 = npt.NDArray[np.float32]


def array(*values: float) -> F32:
    return np.array(values, np.float32)


def spread(n: int, seed: int) -> F32:
    """Return n varied values around 0. They are computed from integers, so that they are the same on every machine."""
    draws = np.random.RandomState(seed).randint(-1000, 1001, (3, n)).sum(axis=0)
    return (draws / 997).astype(np.float32)


def hexadecimal(values: F32) -> str:
    """Return the bytes of fp32 values, little-endian, in hexadecimal."""
    return values.astype("<f4").tobytes().hex()


def encoded(codec: str, values: F32) -> npt.NDArray[np.uint8]:
    raw = np.empty(REFERENCE[codec].size(len(values)), np.uint8)
    REFERENCE[codec].encode(values, raw)
    return raw


def decoded(codec: str, raw: npt.NDArray[np.uint8], n: int) -> F32:
    out = np.empty(n, np.float32)
    REFERENCE[codec].decode(raw, out)
    return out


def state_digest(theta: F32, momentum: F32) -> bytes:
    state = StateHash()
    state.update(theta.data, momentum.data)
    return state.digest()


def contribution(values: F32, codec: str = "int8", compress: Sequence[int] = (), **changes: Any) -> bytes:
    frames = framed(values, codec, wire.CHUNK_ELEMENTS, compress)
    fields = {
        **common(values, codec, wire.CHUNK_ELEMENTS, frames),
        "worker": "a",
        "base": state_digest(array(1, -2, 0.5, 0, 3), array(0, 0, 0, 0, 0)),
        "tokens": 2048,
        "inner_steps": 1,
        "loss": 5.5,
        "norm": math.sqrt(math.fsum(float(value) ** 2 for value in values)),
        "units": [[0, 1]],
        "carried": [],
        "carried_share": 1.0,
    }
    return packed(wire.ContributionHeader.model_validate(fields | changes), frames)


def delta(values: F32, codec: str = "int8", frame: bytes | None = None, **changes: Any) -> bytes:
    frames = framed(values, codec, wire.CHUNK_ELEMENTS) if frame is None else [frame]
    fields = common(values, codec, wire.CHUNK_ELEMENTS, frames) | {
        "base": bytes(range(32)),
        "contributors": [
            {"worker": "a", "tokens": 2048, "factor": 1.0},
            {"worker": "b", "tokens": 4096, "factor": 0.5},
        ],
    }
    return packed(wire.DeltaHeader.model_validate(fields | changes), frames)


def state(both: F32, chunk_elements: int, compress: Sequence[int] = (), **changes: Any) -> bytes:
    frames = framed(both, "fp32", chunk_elements, compress)
    fields = common(both, "fp32", chunk_elements, frames)
    return packed(wire.StateHeader.model_validate(fields | changes), frames)


def framed(values: F32, codec: str, chunk_elements: int, compress: Sequence[int] = ()) -> list[Buffer]:
    raw = [encoded(codec, values[at : at + chunk_elements]).tobytes() for at in range(0, len(values), chunk_elements)]
    return [zstd_frame(chunk) if index in compress else chunk for index, chunk in enumerate(raw)]


def common(values: F32, codec: str, chunk_elements: int, frames: Sequence[Buffer]) -> dict[str, Any]:
    sizes = {"elements": len(values), "chunk_elements": chunk_elements, "frame_bytes": [len(frame) for frame in frames]}
    return {"run": "demo", "round": 0, "fragment": 0, "codec": codec, **sizes}


def packed(header: wire.Header, frames: Sequence[Buffer]) -> bytes:
    return wire.pack_header(header) + b"".join(frames)
