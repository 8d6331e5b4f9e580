"""Encode and decode the payloads of the exchange with the codecs in torch, on any device.

On a GPU this saves transferring the fp32 values to the host. In host memory the torch codecs are a little faster than
the numpy reference. Compiled kernels, if installed, replace both there. docs/wire-format.md describes the formats.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol import wire
from protocol.codecs import CODECS, REFERENCE
from protocol.digest import Buffer
from protocol.errors import UnexpectedAnswer
from worker.codecs.torch_codecs import IN_TORCH, TorchCodec

U8 = npt.NDArray[np.uint8]

CHUNKS_AT_ONCE = 32  # encoded at once on a GPU; their values have 32 MB


def _with_kernels(name: str) -> TorchCodec:
    """Return a codec that encodes tensors in host memory with the compiled kernels."""

    def encode(x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return IN_TORCH[name].encode(x)
        out = torch.empty((*x.shape[:-1], CODECS[name].size(x.shape[-1])), dtype=torch.uint8, device="cpu")
        if x.dim() == 1:
            CODECS[name].encode(x.numpy(), out.numpy())
        else:
            for row, encoded in zip(x, out, strict=True):
                CODECS[name].encode(row.numpy(), encoded.numpy())
        return out

    return replace(IN_TORCH[name], encode=encode)


TORCH_CODECS: dict[str, TorchCodec] = {
    name: codec if CODECS[name] is REFERENCE[name] else _with_kernels(name) for name, codec in IN_TORCH.items()
}


def encoded_chunks(vector: Tensor, codec: str) -> Iterator[U8]:
    """Encode float32[n], on its device, in chunks of `wire.CHUNK_ELEMENTS`: uint8[size] of each, in host memory.

    Raises CodecError for values that the codec cannot represent.
    """
    for chunks in batches(vector):
        yield from _in_host_memory(TORCH_CODECS[codec].encode(chunks)).numpy()


def batches(vector: Tensor) -> Iterator[Tensor]:
    """Yield the chunks of float32[n] in order, as many at once as is best for its device: float32[chunks, elements].
    The last chunk may be shorter."""
    at_once = 1 if vector.device.type == "cpu" else CHUNKS_AT_ONCE
    whole = len(vector) // wire.CHUNK_ELEMENTS * wire.CHUNK_ELEMENTS
    if whole:
        yield from vector[:whole].view(-1, wire.CHUNK_ELEMENTS).split(at_once)
    if whole < len(vector):
        yield vector[None, whole:]


def _in_host_memory(encoded: Tensor) -> Tensor:
    """Return `encoded`, or a copy if it is on a GPU: page-locked, as the device writes there several times as fast."""
    if encoded.device.type != "cuda":
        return encoded.cpu()
    return torch.empty(encoded.shape, dtype=encoded.dtype, device="cpu", pin_memory=True).copy_(encoded)


def pack_fragment(vector: Tensor, codec: str, *, zstd: bool) -> list[Buffer]:
    """Encode float32[n], on its device, into the frames of a payload. Raises CodecError."""
    return [wire.pack_frame(raw, zstd=zstd) for raw in encoded_chunks(vector, codec)]


def round_trip(vector: Tensor, codec: str) -> Tensor:
    """Return the values that a receiver of the encoded vector decodes, float32[n] on the same device."""
    encode, decode = TORCH_CODECS[codec].encode, TORCH_CODECS[codec].decode
    sizes = wire.chunk_sizes(len(vector), wire.CHUNK_ELEMENTS)
    encoded = (each for chunks in batches(vector) for each in encode(chunks))
    return torch.cat([decode(each, n) for each, n in zip(encoded, sizes, strict=True)])


def unpack_payload(payload: wire.Payload, device: torch.device, elements: int) -> Tensor:
    """Return all values of a payload, float32[elements] on `device`. Raises UnexpectedAnswer, before allocating memory,
    if the payload has another number of values, and WireError if they are not finite."""
    if payload.header.elements != elements:
        raise UnexpectedAnswer(f"a payload of {payload.header.elements} elements instead of the layout's {elements}")
    codec = payload.codec
    out = torch.empty(elements, dtype=torch.float32, device=device)
    start = 0
    for index, n in enumerate(payload.chunks):
        raw, part = payload.chunk(index), out[start : start + n]
        codec.check(raw, n, payload.limit)
        if device.type == "cpu":
            codec.decode(raw, part.numpy())
        else:
            # A copy, because a frame is a read-only view of the payload's bytes and torch requires writable memory.
            data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)
            part.copy_(TORCH_CODECS[codec.name].decode(data, n))
        start += n
    return out
