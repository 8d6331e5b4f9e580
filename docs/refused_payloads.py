"""Payloads that a reader must reject, and values that a writer must not encode: at least one of each kind of fault."""

import struct
from collections.abc import Iterator
from typing import Any

import msgpack

from docs.zstd_frames import frame_without_size, zstd_frame
from protocol.codecs import CODECS

ZEROS = bytes.fromhex("8000") + bytes(200)  # 200 zeros by int8

FIELDS: dict[str, Any] = {
    "kind": "contribution",
    "run": "demo",
    "round": 0,
    "fragment": 0,
    "codec": "int8",
    "elements": 5,
    "chunk_elements": 262_144,
    "frame_bytes": [7],
    "worker": "a",
    "base": bytes(32),
    "tokens": 2048,
    "inner_steps": 1,
    "loss": 5.5,
    "norm": 1.0,
    "units": [[0, 1]],
    "carried": [],
    "carried_share": 1.0,
}
FRAME = bytes.fromhex("023c 3f e0 10 00 82")

# Invalid headers: the name of the vector and the changed fields; None removes the field.
HEADERS: list[tuple[str, dict[str, Any]]] = [
    ("a key is missing", {"tokens": None}),
    ("a key is of another kind of payload", {"contributors": []}),
    ("a kind that there is not", {"kind": "gradient"}),
    ("a codec that there is not", {"codec": "fp8"}),
    ("a boolean for an integer", {"fragment": True}),
    ("a float for an integer", {"tokens": 2048.0}),
    ("an integer of 2^63", {"round": 1 << 63}),
    ("a negative integer", {"round": -1}),
    ("no elements", {"elements": 0}),
    ("no tokens", {"tokens": 0}),
    ("text for bytes", {"base": "0" * 32}),
    ("31 bytes of base", {"base": bytes(31)}),
    ("a name of 65 characters", {"worker": "w" * 65}),
    ("a loss that is not a number", {"loss": float("nan")}),
    ("an infinite norm", {"norm": float("inf")}),
    ("a share of 0", {"carried_share": 0.0}),
    ("a share above 1", {"carried_share": 1.5}),
    ("a range of three", {"units": [[0, 1, 2]]}),
    ("an empty frame", {"frame_bytes": [0]}),
]

# Bytes to which the codec gives no meaning: codec, name, elements, chunk.
CHUNKS: list[tuple[str, str, int, str]] = [
    ("fp32", "a NaN", 2, "0000803f 0000c07f"),
    ("fp32", "an infinity", 1, "0000807f"),
    ("bf16", "a NaN", 1, "c07f"),
    ("bf16", "a negative infinity", 1, "80ff"),
    ("int8", "a scale below 2^-126", 1, "7f00 01"),
    ("int8", "a scale above 2^120", 1, "817b 01"),
    ("int8", "a negative scale", 1, "80bf 01"),
    ("int8", "the code -128", 2, "803f 01 80"),
    ("int4", "the code -8 in a lower half", 2, "803f 18"),
    ("int4", "the code -8 in an upper half", 2, "803f 81"),
    ("int4", "a code beyond the last value", 1, "803f 11"),
    ("2bit", "a code beyond the last value", 3, "803f 40"),
    ("ternary", "the code -2", 1, "803f 02"),
    ("ternary", "a code beyond the last value", 3, "803f 40"),
    ("sparse", "two indices of at most one", 5, "803f 03 00 00"),
    ("sparse", "an index beyond the last element", 5, "803f 01 05 00"),
    ("sparse", "an index twice", 130, "803f 03 410000 00"),
    ("sparse", "indices that descend", 130, "803f 03 420000 00"),
    ("sparse", "a bit beyond the upper parts", 5, "803f 04 00 00"),
    ("sparse", "a lower part too many", 5, "803f 01 40 00"),
    ("sparse", "a value too many", 5, "803f 01 00 04"),
]

# Contributions with values above 2^100: as fp32, bf16, and as the largest code times a block's scale.
TOO_LARGE: list[tuple[str, int, str]] = [
    ("fp32", 1, "01008071"),
    ("bf16", 1, "8171"),
    ("int8", 1, "0f6e 00"),
    ("int4", 1, "1370 00"),
    ("2bit", 1, "556e 00"),
    ("ternary", 1, "8171 00"),
    ("sparse", 1, "cd6f 00 00 00"),
]

# Values that a writer must not encode, as the bits of fp32.
UNWRITABLE: list[tuple[str, str, str]] = [
    *((codec, "a NaN", "0000803f 0000c07f") for codec in CODECS),
    *((codec, "an infinity", "000080ff") for codec in CODECS),
    ("bf16", "what rounds to infinity", "ffff7f7f"),
    ("int8", "more than 127 · 2^120", "0100fe7e"),
    ("int4", "more than 7 · 2^120", "0100e07c"),
    ("2bit", "a square that fp32 does not hold", "00008060"),
    ("ternary", "a square that fp32 does not hold", "00008060"),
    ("sparse", "a scale above 2^120", "ffff7f7f"),
]


def cases() -> list[dict[str, Any]]:
    """Return all cases as the file has them."""
    refused = [{"kind": kind, "name": name, "payload": body.hex()} for kind, name, body in payloads()]
    unwritable = [
        {"kind": "values", "name": name, "codec": codec, "values": bytes.fromhex(values).hex()}
        for codec, name, values in UNWRITABLE
    ]
    return refused + unwritable


def payloads() -> Iterator[tuple[str, str, bytes]]:
    """Yield (kind of fault, name, payload)."""
    sound = payload()
    yield "length", "nothing at all", b""
    yield "length", "half a prefix", sound[:6]
    yield "length", "the last byte is missing", sound[:-1]
    yield "length", "a byte too many", sound + b"\0"
    yield "length", "the header is longer than what is there", sound[:8] + (1 << 16).to_bytes(4, "little") + sound[12:]
    yield "length", "a header of more than 2^20 bytes", prefix((1 << 20) + 1)
    yield "magic", "another magic", b"OSTQ" + sound[4:]
    yield "version", "version 2", prefix(len(sound) - 12 - len(FRAME), version=2) + sound[12:]
    yield "version", "the reserved bytes are not 0", prefix(len(sound) - 12 - len(FRAME), reserved=1) + sound[12:]
    yield "header", "no msgpack", prefix(1) + b"\xc1"
    yield "header", "half a msgpack map", prefix(20) + sound[12:32]
    yield "header", "an array", enclosed([1, 2, 3], FRAME)
    for name, changes in HEADERS:
        fields = {key: value for key, value in {**FIELDS, **changes}.items() if value is not None}
        yield "header", name, enclosed(fields, FRAME)
    yield "frames", "two frames for one chunk", payload(FRAME[:3], FRAME[3:])
    yield "frames", "a frame that is longer than its chunk", payload(FRAME + b"\0")
    yield "frames", "no frames", enclosed({**FIELDS, "frame_bytes": []}, b"")
    yield "zstd", "no zstd frame", payload(b"\0" * 6)
    zeros = {"elements": 200}
    yield "zstd", "it does not declare its size", payload(frame_without_size(ZEROS), **zeros)
    yield "zstd", "it declares less than the chunk", payload(zstd_frame(ZEROS[:-1]), **zeros)
    yield "zstd", "it declares 2^32 - 1 bytes", payload(zstd_frame(ZEROS, declared=(1 << 32) - 1), **zeros)
    yield "zstd", "it has less than it declares", payload(zstd_frame(ZEROS[:-1], declared=len(ZEROS)), **zeros)
    yield "zstd", "it has more than it declares", payload(zstd_frame(ZEROS + b"\0", declared=len(ZEROS)), **zeros)
    yield "zstd", "something comes after it", payload(zstd_frame(ZEROS) + b"\0", **zeros)
    yield "zstd", "another frame comes after it", payload(zstd_frame(ZEROS) * 2, **zeros)
    yield "zstd", "it needs a dictionary", payload(zstd_frame(ZEROS, dictionary=7), **zeros)
    yield "zstd", "its last block is cut off", payload(zstd_frame(ZEROS)[:-1], **zeros)
    for codec, name, elements, chunk in CHUNKS:
        yield "codes", f"{codec}: {name}", payload(bytes.fromhex(chunk), codec=codec, elements=elements)
    for codec, elements, chunk in TOO_LARGE:
        yield "magnitude", f"{codec}: above 2^100", payload(bytes.fromhex(chunk), codec=codec, elements=elements)
    yield from several_faults(sound)


def several_faults(sound: bytes) -> Iterator[tuple[str, str, bytes]]:
    """Yield payloads with several faults; the first one in the order of checks gives the kind."""
    header = sound[12 : len(sound) - len(FRAME)]
    yield "length", "too few bytes for a prefix, and another magic", b"OSTQ" + sound[4:11]
    yield "magic", "another magic, and version 2", b"OSTQ" + prefix(len(header), version=2)[4:] + header + FRAME
    yield "version", "version 2, and a header of more than 2^20 bytes", prefix((1 << 20) + 1, version=2)
    yield "length", "a header that is not msgpack, and longer than what is there", prefix(2) + b"\xc1"
    yield "header", "an empty frame, and no chunk for it", enclosed({**FIELDS, "frame_bytes": [7, 0]}, FRAME)
    yield "header", "no tokens, and the last byte is missing", enclosed({**FIELDS, "tokens": 0}, FRAME[:-1])
    yield "frames", "two frames for one chunk, and the last byte is missing", payload(FRAME[:3], FRAME[3:])[:-1]
    yield "frames", "a frame that is longer than its chunk, and a byte too many", payload(FRAME + b"\0") + b"\0"
    yield "length", "no zstd frame, and a byte too many", payload(b"\0" * 6) + b"\0"
    two = {"codec": "fp32", "elements": 2, "chunk_elements": 1}
    nan, huge = bytes.fromhex("0000c07f"), bytes.fromhex("01008071")
    yield "codes", "a NaN in the first chunk, and no zstd frame for the second", payload(nan, b"\0\0\0", **two)
    yield "zstd", "no zstd frame for the first chunk, and a NaN in the second", payload(b"\0\0\0", nan, **two)
    yield "magnitude", "above 2^100 in the first chunk, and a NaN in the second", payload(huge, nan, **two)
    yield "codes", "above 2^100, and a NaN", payload(huge + nan, codec="fp32", elements=2)
    yield "codes", "above 2^100, and the code -128", payload(bytes.fromhex("0f6e 00 80"), elements=2)


def payload(*frames: bytes, **changes: Any) -> bytes:
    """Return the contribution of FIELDS with these frames and changed fields."""
    frames = frames or (FRAME,)
    return enclosed({**FIELDS, "frame_bytes": [len(frame) for frame in frames], **changes}, b"".join(frames))


def enclosed(header: Any, frames: bytes) -> bytes:
    body = msgpack.packb(header)
    return prefix(len(body)) + body + frames


def prefix(header_bytes: int, *, version: int = 1, reserved: int = 0) -> bytes:
    return struct.pack("<4sHHI", b"OSTP", version, reserved, header_bytes)
