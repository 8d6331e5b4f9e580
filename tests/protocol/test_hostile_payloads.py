"""Whatever the bytes are: a valid payload or WireError, nothing else, and little memory."""

import contextlib
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.member import pack_frames
from protocol.codecs import CODECS
from protocol.errors import WireError
from protocol.wire import PREFIX, ContributionHeader, Payload, pack_header
from tests.support.cases import case

N = 600  # elements
CHUNK = 256


def header_fields() -> dict[str, Any]:
    return {
        "kind": "contribution",
        "run": "demo",
        "round": 1,
        "fragment": 0,
        "codec": "int8",
        "elements": N,
        "chunk_elements": CHUNK,
        "frame_bytes": [],
        "worker": "w0",
        "base": bytes(32),
        "tokens": 4096,
        "inner_steps": 2,
        "loss": 2.5,
        "norm": 1.0,
        "units": [[0, 2]],
        "carried": [],
        "carried_share": 1.0,
    }


def frames() -> list[bytes]:
    values = np.zeros(N, np.float32)
    values[:CHUNK] = np.random.default_rng(0).standard_normal(CHUNK)  # the first chunk stays raw, the rest compress
    return [bytes(frame) for frame in pack_frames(values, CODECS["int8"], zstd=True, chunk_elements=CHUNK)]


def raw_payload(document: Any, pieces: list[bytes]) -> bytes:
    body = document if isinstance(document, bytes) else msgpack.packb(document)
    return PREFIX.pack(b"OSTP", 1, 0, len(body)) + body + b"".join(pieces)


def as_map(pairs: list[tuple[str, Any]]) -> bytes:
    """A msgpack map of these keys and values, repeated keys and all."""
    return b"\xde" + struct.pack(">H", len(pairs)) + b"".join(msgpack.packb(each) for pair in pairs for each in pair)


def payload(pieces: list[bytes], **changes: Any) -> bytes:
    fields = header_fields() | {"frame_bytes": [len(piece) for piece in pieces]} | changes
    return raw_payload({key: value for key, value in fields.items() if value is not ...}, pieces)


VALID = payload(frames())


def read(data: bytes) -> None:
    """Everything that a receiver does with a payload."""
    opened = Payload.from_bytes(data)
    opened.check()
    assert opened.header.elements <= 1 << 20, "a mutation made a large payload of a small one"
    values = np.empty(opened.header.elements, np.float32)
    opened.decode(values)
    assert np.isfinite(values).all()


def read_or_wire_error(data: bytes) -> None:
    with contextlib.suppress(WireError):
        read(data)


def test_the_unharmed_payload_is_valid() -> None:
    read(VALID)
    assert (
        pack_header(ContributionHeader.model_validate(header_fields() | {"frame_bytes": [258, 18, 18]}))[:4] == b"OSTP"
    )


@given(st.binary(max_size=400))
@example(b"")
@example(b"OSTP")
def test_any_bytes(data: bytes) -> None:
    read_or_wire_error(data)
    read_or_wire_error(raw_payload(data, []))


@pytest.mark.slow
@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(sorted(header_fields())), inner)))  # fmt: skip
def test_any_msgpack(document: Any) -> None:
    read_or_wire_error(raw_payload(document, frames()))


@pytest.mark.slow
@given(key=st.sampled_from(sorted(header_fields())),
       value=st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary() | st.lists(st.integers(-1, 300)))  # fmt: skip
@settings(max_examples=300)
def test_any_value_of_one_field(key: str, value: Any) -> None:
    read_or_wire_error(payload(frames(), **{key: value}))


def test_truncated() -> None:
    for end in range(len(VALID)):
        with case(end), pytest.raises(WireError):
            read(VALID[:end])


def test_one_byte_more() -> None:
    with pytest.raises(WireError, match="the header describes"):
        read(VALID + b"\0")


@pytest.mark.slow
@given(flips=st.lists(st.integers(0, 8 * len(VALID) - 1), min_size=1, max_size=4))
@settings(max_examples=500)
def test_flipped_bits(flips: list[int]) -> None:
    data = bytearray(VALID)
    for flip in flips:
        data[flip // 8] ^= 1 << flip % 8
    read_or_wire_error(bytes(data))


@given(position=st.integers(0, len(VALID)), inserted=st.binary(min_size=1, max_size=9), removed=st.integers(0, 9))
def test_spliced(position: int, inserted: bytes, removed: int) -> None:
    read_or_wire_error(VALID[:position] + inserted + VALID[position + removed :])


def test_carried_rounds_and_maps_within_that_are_in_order_are_taken() -> None:
    read(payload(frames(), round=3, carried=[0, 2]))
    read(with_contributors(as_map([("worker", "a"), ("tokens", 1), ("factor", 0.5)])))


def test_every_key_is_required_and_no_other_is_allowed() -> None:
    for key in header_fields():
        with pytest.raises(WireError):
            read(payload(frames(), **{key: ...}))
    with pytest.raises(WireError, match="surprise"):
        read(payload(frames(), surprise=1))


def with_contributors(contributors: bytes) -> bytes:
    """A delta's payload that lists these msgpack bytes as its contributors."""
    own = ("worker", "tokens", "inner_steps", "loss", "norm", "units", "carried", "carried_share")
    fields = {key: value for key, value in header_fields().items() if key not in own}
    fields |= {"kind": "delta", "frame_bytes": [len(piece) for piece in frames()]}
    document = as_map([*fields.items(), ("contributors", [])])
    return raw_payload(document.removesuffix(b"\x90") + b"\x91" + contributors, frames())


# Beside those of docs/vectors/refused.json.
CASES: dict[str, tuple[Callable[[], bytes], str]] = {
    "header longer than allowed": (lambda: VALID[:8] + struct.pack("<I", (1 << 20) + 1) + VALID[12:] + bytes(2 << 20), "allowed"),
    "msgpack with a tail": (lambda: raw_payload(msgpack.packb(header_fields()) + b"\0", frames()), "not msgpack"),
    "a key that is no string": (lambda: raw_payload({1: 2}, []), "not msgpack"),
    "nested too deeply": (lambda: raw_payload(b"\x91" * 5000 + b"\0", []), "not msgpack"),
    "a msgpack timestamp": (lambda: payload(frames(), round=msgpack.Timestamp(1)), "header field contribution.round"),
    "elements as text": (lambda: payload(frames(), elements="600"), "elements"),
    "too many elements": (lambda: payload(frames(), elements=(1 << 31) + 1), "elements"),
    "chunks of nothing": (lambda: payload(frames(), chunk_elements=0), "chunk_elements"),
    "huge chunks": (lambda: payload(frames(), chunk_elements=1 << 23), "chunk_elements"),
    "one element more than the frames hold": (lambda: payload(frames(), elements=3 * CHUNK + 1), "4 frames, the header lists 3"),
    "huge frame lengths": (lambda: payload(frames(), frame_bytes=[2**63] * 3), "frame 0 has"),
    "lengths beyond the end": (lambda: payload(frames(), frame_bytes=[258, 100, 80]), "but the payload has"),
    "a key twice": (lambda: raw_payload(as_map([*header_fields().items(), ("round", 1)]), frames()), "'round' occurs twice"),
    "a key twice in a map within": (lambda: with_contributors(as_map([("worker", "a"), ("tokens", 1), ("tokens", 2)])), "'tokens' occurs twice"),
    "a contributor that does not count": (lambda: with_contributors(as_map([("worker", "a"), ("tokens", 1), ("factor", 0.0)])), "factor"),
    "a contributor that counts twice": (lambda: with_contributors(as_map([("worker", "a"), ("tokens", 1), ("factor", 2.0)])), "factor"),
    "a carried round that is still to come": (lambda: payload(frames(), carried=[5]), "carried lists rounds before 1"),
    "its own round carried": (lambda: payload(frames(), carried=[0, 1]), "carried lists rounds before 1"),
    "a carried round twice": (lambda: payload(frames(), carried=[0, 0]), "carried lists rounds before 1"),
    "carried rounds in disorder": (lambda: payload(frames(), round=3, carried=[1, 0]), "carried lists rounds before 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_case(case: str) -> None:
    make, message = CASES[case]
    with pytest.raises(WireError, match=message):
        read(make())


def zstd_frame(data: bytes, *, content_size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=content_size).compress(data)


def lying_frame(declared: int, content: bytes) -> bytes:
    """A valid zstd frame of `content` whose header declares another size (4-byte field, single segment)."""
    frame = zstd_frame(content)
    honest = zstandard.get_frame_parameters(frame)
    header_bytes = zstandard.frame_header_size(frame)
    assert honest.content_size == len(content)
    return frame[:4] + b"\xa0" + struct.pack("<I", declared) + frame[header_bytes:]


ZSTD_CASES: dict[str, tuple[Callable[[], bytes], str]] = {
    "declares more than the chunk": (lambda: zstd_frame(bytes(50_000_000))[:200], "declares 50000000 bytes"),
    "declares the chunk, expands to more": (lambda: lying_frame(258, bytes(10_000_000))[:200], "frame 0"),
    "a skippable frame": (lambda: struct.pack("<II", 0x184D2A50, 100) + bytes(100), "frame 0"),
    "one byte": (lambda: b"\x28", "frame 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", ZSTD_CASES)
def test_zstd_case(case: str) -> None:
    make, message = ZSTD_CASES[case]
    frame = make()
    assert len(frame) < 258, "as long as a raw frame, so it would not be decompressed at all"
    data = payload([frame, *frames()[1:]])
    tracemalloc.start()
    with pytest.raises(WireError, match=message):
        read(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000


def array(length: int) -> bytes:
    """The head of a msgpack array."""
    return b"\xdd" + struct.pack(">I", length)


MIB = 1 << 20
# A header of a megabyte once took 3.7 GB and half a minute: pydantic collected a million faults.
BOMBS: dict[str, Callable[[], bytes]] = {
    "elements without end in chunks of one": lambda: payload([b"\0\0\0"], elements=1 << 31, chunk_elements=1),
    "a million wrong frame lengths": lambda: payload([], frame_bytes=[0] * (MIB - 1000)),
    "65,536 wrong frame lengths": lambda: payload([], frame_bytes=[0] * 65_536),
    "a million empty lists": lambda: payload([], frame_bytes=[[]] * (MIB - 1000)),
    "65,536 empty unit ranges": lambda: payload(frames(), units=[[]] * 65_536),
    "65,536 broken contributors": lambda: payload(frames(), kind="delta", contributors=[{}] * 65_536),
    "100,000 unknown keys": lambda: raw_payload({format(i, "x"): 0 for i in range(100_000)}, []),
    "arrays that claim more than is there": lambda: raw_payload(array(MIB - 10) * 1000 + bytes(MIB - 6000), []),
    "nested arrays of 65,536": lambda: raw_payload(array(65_536) * 1000 + bytes(MIB - 6000), []),
    "a string that claims 4 GB": lambda: raw_payload(b"\xdb\xff\xff\xff\xff" + bytes(100), []),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.covers("security:payload-bombs")
@pytest.mark.parametrize("case", BOMBS)
def test_a_hostile_header_takes_bounded_memory(case: str) -> None:
    """At most a hundred bytes for each of a header's bytes, of which there are at most 2^20."""
    data = BOMBS[case]()
    tracemalloc.start()
    with pytest.raises(WireError):
        Payload.from_bytes(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * MIB
