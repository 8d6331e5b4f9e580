"""The payload: the bytes of a contribution, of a delta and of a checkpoint's fragment.

    magic "OSTP" · uint16 version · uint16 zero · uint32 header length · msgpack header · frames

docs/wire-format.md is the specification. A frame is one chunk of a fixed number of elements, either raw (exactly as
long as the codec says) or one zstd frame (shorter than that). Because a raw frame's length is known beforehand, every
length is checked before anything is allocated or decompressed.
"""

import struct
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import msgpack
import numpy as np
import numpy.typing as npt
import zstandard
from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter, ValidationError, model_validator

from protocol.codecs import CODECS, CodecName
from protocol.digest import DIGEST_BYTES, Buffer
from protocol.errors import WireError, WireFault

MEDIA_TYPE = "application/vnd.outerstep.payload"
MAGIC = b"OSTP"
VERSION = 1
PREFIX = struct.Struct("<4sHHI")
MAX_HEADER_BYTES = 1 << 20
CHUNK_ELEMENTS = 1 << 18
DIFFERENCES = "int4"  # codec of differences between deltas; it has a zero, so what nobody has trained stays as it is
MAX_CHUNK_ELEMENTS = 1 << 22
MAX_ELEMENTS = 1 << 31
MAX_FRAMES = 1 << 16
MAX_UNIT_RANGES = 1 << 16
MAX_CONTRIBUTORS = 10_000
MAX_MAP_KEYS = 32
ZSTD_LEVEL = 1
# Far below the fp32 maximum, so that every codec can represent any mean of contributions. Otherwise one worker whose
# training diverged could make a round that cannot be encoded.
MAX_CONTRIBUTED = 2.0**100
MAX_FINITE = float(np.finfo(np.float32).max)

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

Digest = Annotated[bytes, Field(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Index = Annotated[int, Field(ge=0, lt=1 << 63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
UnitRange = Annotated[list[Index], Field(min_length=2, max_length=2)]


class _Strict(BaseModel):
    # Lists fail fast: collecting a million errors in a hostile header took gigabytes.
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Contributor(_Strict):
    """A worker whose contribution is in a delta: its weight before normalisation, and the factor applied to it."""

    worker: Annotated[str, Field(max_length=64)]
    tokens: Index
    factor: Annotated[Finite, Field(gt=0, le=1)]


class _Header(_Strict):
    run: Annotated[str, Field(max_length=64)]
    round: Index
    fragment: Index
    codec: CodecName
    elements: Annotated[int, Field(ge=1, le=MAX_ELEMENTS)]
    chunk_elements: Annotated[int, Field(ge=1, le=MAX_CHUNK_ELEMENTS)]
    frame_bytes: Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=MAX_FRAMES), FailFast()]


class ContributionHeader(_Header):
    """One worker's pseudo-gradient of one fragment. `base`: the state digest that it was computed against; `units`:
    half-open ranges of the work units that it was trained on; `loss`: the mean training loss in nats per token, None
    if not reported; `norm`: the L2 norm of the fragment's pseudo-gradient before encoding.

    `carried`: earlier rounds, ascending, whose late work is included, minus the deltas that those rounds published,
    times `carried_share`. `tokens`, its weight in the mean, counts only its own round, while `units` includes the
    carried ones."""

    kind: Literal["contribution"] = "contribution"
    worker: Annotated[str, Field(max_length=64)]
    base: Digest
    tokens: Annotated[int, Field(ge=1, lt=1 << 63)]
    inner_steps: Index
    loss: Finite | None
    norm: Finite
    units: Annotated[list[UnitRange], Field(max_length=MAX_UNIT_RANGES), FailFast()]
    carried: Annotated[list[Index], Field(max_length=MAX_UNIT_RANGES), FailFast()]
    carried_share: Annotated[Finite, Field(gt=0, le=1)]

    @model_validator(mode="after")
    def _carries_earlier_rounds(self) -> Self:
        if any(earlier >= later for earlier, later in pairwise([*self.carried, self.round])):
            raise ValueError(f"carried lists rounds before {self.round}, ascending, none twice")
        return self


class DeltaHeader(_Header):
    """The averaged pseudo-gradient of one fragment. `contributors` are in worker-id order."""

    kind: Literal["delta"] = "delta"
    base: Digest
    contributors: Annotated[list[Contributor], Field(max_length=MAX_CONTRIBUTORS), FailFast()]


class StateHeader(_Header):
    """One fragment's outer state before round `round`: θ, then the momentum u; `elements` counts both."""

    kind: Literal["state"] = "state"


Header = ContributionHeader | DeltaHeader | StateHeader
_HEADERS: TypeAdapter[Header] = TypeAdapter(Annotated[Header, Field(discriminator="kind")])


class _Zstd(threading.local):
    """The zstd contexts of one thread; they must not be shared between threads."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def chunk_sizes(elements: int, chunk_elements: int) -> Iterator[int]:
    """Yield the number of elements of each chunk. All chunks are full except the last."""
    for start in range(0, elements, chunk_elements):
        yield min(chunk_elements, elements - start)


def max_payload_bytes(codec: str, elements: int) -> int:
    """Return an upper bound of a payload's size in bytes, header included."""
    sizes = chunk_sizes(elements, CHUNK_ELEMENTS)
    return PREFIX.size + MAX_HEADER_BYTES + sum(CODECS[codec].size(n) for n in sizes)


def max_payloads_bytes(codec: str, payloads: int, elements: int) -> int:
    """Return an upper bound of the total bytes of this many payloads with this many elements in total."""
    chunks = payloads + elements // CHUNK_ELEMENTS
    return payloads * (PREFIX.size + MAX_HEADER_BYTES) + chunks * CODECS[codec].size(CHUNK_ELEMENTS)


def pack_frame(raw: U8, *, zstd: bool) -> Buffer:
    """Return the frame of one encoded chunk: compressed if `zstd` is set and it gets shorter, otherwise raw."""
    if zstd:
        packed = _zstd.compressor.compress(raw.data)
        if len(packed) < len(raw):
            return packed
    return raw.data


def pack_header(header: Header) -> bytes:
    """Return prefix and header: the part of a payload before its frames."""
    body: bytes = msgpack.packb(header.model_dump(), use_bin_type=True)
    if len(body) > MAX_HEADER_BYTES:
        raise WireError(WireFault.LENGTH, f"the header has {len(body)} bytes, at most {MAX_HEADER_BYTES} are allowed")
    return PREFIX.pack(MAGIC, VERSION, 0, len(body)) + body


class Payload:
    """A payload, read through `read_at(offset, length)` so that it need not be in memory.

    The constructor checks prefix, header and every length against `total_bytes`; frames are read and decompressed only
    on request. Raises WireError if the bytes violate the format.
    """

    def __init__(self, read_at: Callable[[int, int], Buffer], total_bytes: int) -> None:
        self._read_at = read_at
        self.total_bytes = total_bytes
        self.header, frames_start = _read_header(read_at, total_bytes)
        self.codec = CODECS[self.header.codec]
        frame_bytes = self.header.frame_bytes
        frames = -(-self.header.elements // self.header.chunk_elements)
        if len(frame_bytes) != frames:
            raise WireError(
                WireFault.FRAMES,
                f"{self.header.elements} elements in chunks of {self.header.chunk_elements} are {frames} "
                f"frames, the header lists {len(frame_bytes)}",
            )
        self.chunks = list(chunk_sizes(self.header.elements, self.header.chunk_elements))
        for index, (length, n) in enumerate(zip(frame_bytes, self.chunks, strict=True)):
            if length > self.codec.size(n):
                raise WireError(
                    WireFault.FRAMES,
                    f"frame {index} has {length} bytes, but {n} elements need at most {self.codec.size(n)}",
                )
        if frames_start + sum(frame_bytes) != total_bytes:
            raise WireError(
                WireFault.LENGTH,
                f"the header describes {frames_start + sum(frame_bytes)} bytes, but the payload has {total_bytes}",
            )
        self.offsets = [frames_start]
        for length in frame_bytes[:-1]:
            self.offsets.append(self.offsets[-1] + length)

    @classmethod
    def from_bytes(cls, data: Buffer) -> "Payload":
        view = memoryview(data)
        return cls(lambda offset, length: view[offset : offset + length], len(view))

    def chunk(self, index: int) -> U8:
        """Return chunk `index` in encoded form, uint8[codec.size(n)], decompressed if necessary."""
        length, raw_bytes = self.header.frame_bytes[index], self.codec.size(self.chunks[index])
        frame = self._read_at(self.offsets[index], length)
        if len(frame) != length:
            raise WireError(WireFault.LENGTH, f"frame {index} ends after {len(frame)} of {length} bytes")
        if length < raw_bytes:
            frame = _decompress(frame, raw_bytes, index)
        return np.frombuffer(frame, np.uint8)

    @property
    def limit(self) -> float:
        """The largest magnitude that is allowed for a value of this payload."""
        return MAX_CONTRIBUTED if self.header.kind == "contribution" else MAX_FINITE

    def check(self) -> None:
        """Read every frame. Raises WireError unless all values are finite and within `limit`."""
        for index, n in enumerate(self.chunks):
            self.codec.check(self.chunk(index), n, self.limit)

    def decode(self, out: F32) -> None:
        """Decode all values into `out`, float32[elements]."""
        start = 0
        for index, n in enumerate(self.chunks):
            self.codec.decode(self.chunk(index), out[start : start + n])
            start += n


def _read_header(read_at: Callable[[int, int], Buffer], total_bytes: int) -> tuple[Header, int]:
    if total_bytes < PREFIX.size:
        raise WireError(WireFault.LENGTH, f"{total_bytes} bytes are too few for a payload")
    magic, version, reserved, header_bytes = PREFIX.unpack(read_at(0, PREFIX.size))
    if magic != MAGIC:
        raise WireError(WireFault.MAGIC, "the payload does not start with OSTP")
    if version != VERSION or reserved != 0:
        raise WireError(WireFault.VERSION, f"payload version {version} is not supported, only {VERSION} is")
    if header_bytes > min(MAX_HEADER_BYTES, total_bytes - PREFIX.size):
        raise WireError(
            WireFault.LENGTH, f"the header claims {header_bytes} bytes, more than the payload has or than are allowed"
        )
    try:
        document = msgpack.unpackb(
            read_at(PREFIX.size, header_bytes),
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_map,
            max_array_len=MAX_FRAMES,
            max_map_len=MAX_MAP_KEYS,
        )
        header = _HEADERS.validate_python(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise WireError(
            WireFault.HEADER, f"header field {where or '(all)'}: {first['msg'].removeprefix('Value error, ')}"
        ) from error
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(WireFault.HEADER, f"the header is not msgpack: {str(error) or type(error).__name__}") from error
    return header, PREFIX.size + header_bytes


def _map(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a map of the header. Raises WireError for a duplicate key, which readers would resolve differently."""
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [key for key, _ in pairs]
        raise WireError(
            WireFault.HEADER, f"header key {next(key for key in keys if keys.count(key) > 1)!r} occurs twice in one map"
        )
    return document


def _decompress(frame: Buffer, raw_bytes: int, index: int) -> bytes:
    """Decompress a zstd frame that must declare exactly `raw_bytes`, which is checked before memory is allocated."""
    try:
        declared = zstandard.frame_content_size(frame)
        if declared != raw_bytes:
            raise WireError(
                WireFault.ZSTD, f"frame {index} declares {declared} bytes of content, but its chunk has {raw_bytes}"
            )
        raw = _zstd.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(WireFault.ZSTD, f"frame {index} is not a valid zstd frame: {error}") from error
    if len(raw) != raw_bytes:
        raise WireError(WireFault.ZSTD, f"frame {index} has {len(raw)} bytes of content, but its chunk has {raw_bytes}")
    return raw
