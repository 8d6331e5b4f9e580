"""The codecs in torch, on any device: the same bytes and the same values, bit for bit, as `protocol.codecs`.

On one CPU core these are 1.3 to 6 times as fast as the numpy reference; on a GPU they save the trip of the fp32 values.
Every operation is one fp32 operation rounded to nearest even, as the format demands. docs/wire-format.md describes it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol import wire
from protocol.codecs import CODECS
from protocol.digest import Buffer
from worker.codecs import bf16, fp32, int4, int8, sparse, ternary, two_bit

U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class TorchCodec:
    """encode(float32[n]) -> uint8[size(n)], CodecError for values it cannot carry; decode(uint8[size(n)], n) ->
    float32[n]."""

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, int], Tensor]


TORCH_CODECS: dict[str, TorchCodec] = {
    "fp32": TorchCodec(fp32.encode, fp32.decode),
    "bf16": TorchCodec(bf16.encode, bf16.decode),
    "int8": TorchCodec(int8.encode, int8.decode),
    "int4": TorchCodec(int4.encode, int4.decode),
    "2bit": TorchCodec(two_bit.encode, two_bit.decode),
    "ternary": TorchCodec(ternary.encode, ternary.decode),
    "sparse": TorchCodec(sparse.encode, sparse.decode),
}


def encoded_chunks(vector: Tensor, codec: str) -> Iterator[U8]:
    """Encode float32[n], on its device, in chunks of `wire.CHUNK_ELEMENTS`: uint8[size] of each, in host memory.

    Raises CodecError for values that the codec cannot carry.
    """
    for chunk in vector.split(wire.CHUNK_ELEMENTS):
        yield TORCH_CODECS[codec].encode(chunk).cpu().numpy()


def pack_fragment(vector: Tensor, codec: str, *, zstd: bool) -> list[Buffer]:
    """Encode float32[n], on its device, into the frames of a payload. Raises CodecError like `encoded_chunks`."""
    return [wire.pack_frame(raw, zstd=zstd) for raw in encoded_chunks(vector, codec)]


def round_trip(vector: Tensor, codec: str) -> Tensor:
    """What the receiver of a fragment decodes, float32[n] on the same device."""
    encode, decode = TORCH_CODECS[codec].encode, TORCH_CODECS[codec].decode
    return torch.cat([decode(encode(chunk), len(chunk)) for chunk in vector.split(wire.CHUNK_ELEMENTS)])


def unpack_payload(payload: wire.Payload, device: torch.device) -> Tensor:
    """All values of a payload, float32[elements] on `device`. Raises WireError where they are not finite."""
    codec, reference = TORCH_CODECS[payload.header.codec], CODECS[payload.header.codec]
    out = torch.empty(payload.header.elements, dtype=torch.float32, device=device)
    start = 0
    for index, n in enumerate(payload.chunks):
        raw = payload.chunk(index)
        reference.check(raw, n, payload.limit)
        # A frame is a read-only view of the payload's bytes; torch wants to be told that nobody writes to it.
        data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)
        out[start : start + n] = codec.decode(data, n)
        start += n
    return out


def decoded(payload: wire.Payload) -> Iterator[Tensor]:
    """The chunks of a payload one after the other, float32[n] in host memory, each valid until the next.

    By the numpy reference, which takes half as long as torch where no device is at hand.
    """
    values = torch.empty(payload.chunks[0], dtype=torch.float32)
    for index, n in enumerate(payload.chunks):
        payload.codec.decode(payload.chunk(index), values[:n].numpy())
        yield values[:n]
