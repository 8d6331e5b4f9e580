"""Payloads: literal headers of each kind in both directions, and round trips through frames."""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.codecs import CODECS
from protocol.errors import CodecError, WireError
from protocol.wire import (
    CHUNK_ELEMENTS,
    MAX_HEADER_BYTES,
    PREFIX,
    ContributionHeader,
    Contributor,
    DeltaHeader,
    Header,
    Payload,
    StateHeader,
    chunk_sizes,
    max_payload_bytes,
    pack_frames,
    pack_header,
)

BASE = bytes(range(32))
COMMON = (
    "a372756e a472756e31"  # run: run1
    "a5726f756e64 07"  # round: 7
    "a8667261676d656e74 03"  # fragment: 3
    "a5636f646563 a466703332"  # codec: fp32
    "a8656c656d656e7473 02"  # elements: 2
    "ae6368756e6b5f656c656d656e7473 ce00040000"  # chunk_elements: 262144
    "ab6672616d655f6279746573 91 08"  # frame_bytes: [8]
)
BASE_HEX = "a462617365 c420" + BASE.hex()
FRAME = "0000803f 000020c0"  # 1.0, -2.5
SHARED: dict[str, Any] = {
    "run": "run1",
    "round": 7,
    "fragment": 3,
    "codec": "fp32",
    "elements": 2,
    "chunk_elements": CHUNK_ELEMENTS,
    "frame_bytes": [8],
}

GOLDEN: dict[str, tuple[Header, str]] = {
    "contribution": (
        ContributionHeader(
            **SHARED, worker="w-1", base=BASE, tokens=300, inner_steps=50, loss=1.5, norm=0.25, units=[[0, 4], [9, 10]],
            carried=[3],
            carried_share=0.5,
        ),
        "4f535450 0100 0000 f9000000 de0011" + COMMON + "a46b696e64 ac636f6e747269627574696f6e"
        "a6776f726b6572 a3772d31" + BASE_HEX + "a6746f6b656e73 cd012c"
        "ab696e6e65725f7374657073 32"
        "a46c6f7373 cb3ff8000000000000"
        "a46e6f726d cb3fd0000000000000"
        "a5756e697473 92 920004 92090a"
        "a763617272696564 91 03"
        "ad636172726965645f7368617265 cb3fe0000000000000",
    ),
    "delta": (
        DeltaHeader(**SHARED, base=BASE, contributors=[Contributor(worker="a", tokens=1, factor=1.0), Contributor(worker="b", tokens=2, factor=0.5)]),
        "4f535450 0100 0000 d6000000 8a" + COMMON + "a46b696e64 a564656c7461" + BASE_HEX +
        "ac636f6e7472696275746f7273 92"
        "83 a6776f726b6572 a161 a6746f6b656e73 01 a6666163746f72 cb3ff0000000000000"
        "83 a6776f726b6572 a162 a6746f6b656e73 02 a6666163746f72 cb3fe0000000000000",
    ),
    "state": (StateHeader(**SHARED), "4f535450 0100 0000 5d000000 88" + COMMON + "a46b696e64 a57374617465"),
}  # fmt: skip


@pytest.mark.parametrize("kind", GOLDEN)
def test_golden_bytes(kind: str) -> None:
    header, packed = GOLDEN[kind]
    assert pack_header(header).hex(" ") == bytes.fromhex(packed).hex(" ")
    payload = Payload.from_bytes(bytes.fromhex(packed + FRAME))
    assert payload.header == header
    payload.check()
    values = np.empty(2, np.float32)
    payload.decode(values)
    assert values.tolist() == [1.0, -2.5]


@pytest.mark.parametrize("kind", GOLDEN)
def test_keys_may_come_in_any_order(kind: str) -> None:
    header, _ = GOLDEN[kind]
    body = msgpack.packb(dict(reversed(header.model_dump().items())))
    assert Payload.from_bytes(PREFIX.pack(b"OSTP", 1, 0, len(body)) + body + bytes.fromhex(FRAME)).header == header


def build(values: np.ndarray, codec: str, *, zstd: bool, chunk_elements: int) -> bytes:
    frames = pack_frames(values, CODECS[codec], zstd=zstd, chunk_elements=chunk_elements)
    header = StateHeader(
        run="r",
        round=0,
        fragment=0,
        codec=codec,
        elements=len(values),
        chunk_elements=chunk_elements,
        frame_bytes=[len(frame) for frame in frames],
    )
    return pack_header(header) + b"".join(frames)


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("zstd", [False, True])
@given(n=st.integers(1, 3000), chunk_elements=st.sampled_from([1, 7, 256, 1000, 4096]), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_a_payload_is_what_its_chunks_are(codec: str, zstd: bool, n: int, chunk_elements: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    values[n // 2 :] = 0  # so that some chunks compress and others do not
    payload = Payload.from_bytes(build(values, codec, zstd=zstd, chunk_elements=chunk_elements))
    payload.check()
    decoded = np.empty(n, np.float32)
    payload.decode(decoded)
    expected = np.empty(n, np.float32)
    for start in range(0, n, chunk_elements):
        chunk = values[start : start + chunk_elements]
        raw = np.empty(CODECS[codec].size(len(chunk)), np.uint8)
        CODECS[codec].encode(chunk, raw)
        CODECS[codec].decode(raw, expected[start : start + chunk_elements])
    assert decoded.tobytes() == expected.tobytes()


def test_compression_is_used_only_where_it_shortens() -> None:
    random = np.random.default_rng(0).integers(1, 2**31 - 2**24, 1000).astype(np.uint32).view(np.float32)
    zeros = np.zeros(1000, np.float32)
    payload = Payload.from_bytes(build(np.concatenate([random, zeros]), "fp32", zstd=True, chunk_elements=1000))
    assert payload.header.frame_bytes[0] == 4000
    assert payload.header.frame_bytes[1] < 50


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_the_bound_of_a_payloads_size_holds(codec: str) -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    raw = build(values, codec, zstd=False, chunk_elements=CHUNK_ELEMENTS)
    frames = sum(CODECS[codec].size(n) for n in chunk_sizes(1000, CHUNK_ELEMENTS))
    assert len(raw) <= max_payload_bytes(codec, 1000) == frames + 12 + MAX_HEADER_BYTES


def test_a_payload_is_read_piece_by_piece() -> None:
    """Opening reads prefix and header; each chunk reads its own frame and nothing else."""
    data = build(np.arange(10, dtype=np.float32), "fp32", zstd=False, chunk_elements=4)
    reads: list[tuple[int, int]] = []

    def read_at(offset: int, length: int) -> bytes:
        reads.append((offset, length))
        return data[offset : offset + length]

    payload = Payload(read_at, len(data))
    assert reads == [(0, 12), (12, len(data) - 40 - 12)]
    reads.clear()
    assert payload.chunk(1).view("<f4").tolist() == [4, 5, 6, 7]
    assert reads == [(len(data) - 24, 16)]


def test_a_file_that_shrank_since_it_was_opened() -> None:
    data = build(np.arange(10, dtype=np.float32), "fp32", zstd=False, chunk_elements=4)
    payload = Payload(lambda offset, length: data[: len(data) - 3][offset : offset + length], len(data))
    with pytest.raises(WireError, match="frame 2 ends after 5 of 8 bytes"):
        payload.check()


def test_values_that_cannot_be_encoded() -> None:
    with pytest.raises(CodecError, match="NaN"):
        pack_frames(np.array([1, np.nan], np.float32), CODECS["int8"], zstd=True)


def test_a_header_that_is_too_large_is_not_written() -> None:
    units = [[2**62 + 2 * i, 2**62 + 2 * i + 1] for i in range(60_000)]
    header = ContributionHeader(
        **SHARED,
        worker="w",
        base=BASE,
        tokens=1,
        inner_steps=1,
        loss=0.0,
        norm=0.0,
        units=units,
        carried=[],
        carried_share=1.0,
    )
    with pytest.raises(WireError, match="at most 1048576 are allowed"):
        pack_header(header)
