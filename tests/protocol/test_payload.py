"""Payloads: round trips through frames, in pieces and in bounded space; their digests. Their bytes are in docs/vectors."""

from typing import Any

import msgpack
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.member import pack_frames
from protocol.codecs import CODECS
from protocol.digest import StateHash, content_digest, digest, parse_content_digest
from protocol.errors import WireError
from protocol.wire import (
    CHUNK_ELEMENTS,
    MAX_HEADER_BYTES,
    PREFIX,
    ContributionHeader,
    Payload,
    StateHeader,
    chunk_sizes,
    max_payload_bytes,
    pack_header,
)

BASE = bytes(range(32))
SHARED: dict[str, Any] = {
    "run": "run1",
    "round": 7,
    "fragment": 3,
    "codec": "fp32",
    "elements": 2,
    "chunk_elements": CHUNK_ELEMENTS,
    "frame_bytes": [8],
}


def test_keys_may_come_in_any_order() -> None:
    header = StateHeader(**SHARED)
    body = msgpack.packb(dict(reversed(header.model_dump().items())))
    assert Payload.from_bytes(PREFIX.pack(b"OSTP", 1, 0, len(body)) + body + bytes(8)).header == header


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


@pytest.mark.slow
@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("zstd", [False, True])
@given(n=st.integers(1, 700), chunk_elements=st.sampled_from([1, 7, 256, 300, 4096]), seed=st.integers(0, 99))
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


@pytest.mark.slow
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


def test_a_state_digest_is_of_both_hashes_and_does_not_depend_on_chunks() -> None:
    theta, momentum = np.arange(10, dtype=np.float32), np.arange(10, 20, dtype=np.float32)
    expected = blake3(blake3(theta.tobytes()).digest() + blake3(momentum.tobytes()).digest()).digest()
    for step in (1, 3, 10):
        state = StateHash()
        for start in range(0, 10, step):
            state.update(theta[start : start + step].data, momentum[start : start + step].data)
        assert state.digest() == expected


def test_content_digest_round_trip() -> None:
    value = digest(b"payload")
    assert parse_content_digest(content_digest(value)) == value
    assert parse_content_digest(f"sha-256=:AAAA:, {content_digest(value)}") == value
    assert parse_content_digest("sha-256=:AAAA:") is None
    assert parse_content_digest("") is None


@pytest.mark.parametrize("header", ["blake3=:AAAA:", "blake3=:!!!!:", "blake3=", "blake3=:é:"])
def test_content_digests_that_are_none(header: str) -> None:
    with pytest.raises(ValueError, match="base64|BLAKE3 has 32|ASCII"):
        parse_content_digest(header)
