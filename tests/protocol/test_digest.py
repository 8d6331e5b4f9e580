"""Digests: the published BLAKE3 vectors, what a state digest covers, and the Content-Digest header."""

import numpy as np
import pytest
from blake3 import blake3

from protocol.digest import StateHash, content_digest, digest, model_digest, parse_content_digest


def test_blake3_vectors() -> None:
    """From the official test vectors: empty input, and the one byte 0."""
    assert digest(b"").hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert digest(b"\0").hex() == "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"


def test_digests_of_arrays_are_of_their_bytes() -> None:
    values = np.arange(5, dtype=np.float32)
    assert digest(values.data) == digest(values.tobytes()) == digest(bytearray(values.tobytes()))


def test_a_state_digest_is_of_both_hashes_and_does_not_depend_on_chunks() -> None:
    theta, momentum = np.arange(10, dtype=np.float32), np.arange(10, 20, dtype=np.float32)
    expected = blake3(blake3(theta.tobytes()).digest() + blake3(momentum.tobytes()).digest()).digest()
    for step in (1, 3, 10):
        state = StateHash()
        for start in range(0, 10, step):
            state.update(theta[start : start + step].data, momentum[start : start + step].data)
        assert state.digest() == expected


def test_a_state_digest_sees_signed_zeros_and_which_is_which() -> None:
    def of(theta: list[float], momentum: list[float]) -> bytes:
        state = StateHash()
        state.update(np.array(theta, "<f4").data, np.array(momentum, "<f4").data)
        return state.digest()

    assert len({of([0.0], [1.0]), of([-0.0], [1.0]), of([1.0], [0.0])}) == 3


def test_a_model_digest_depends_on_order() -> None:
    a, b = digest(b"a"), digest(b"b")
    assert model_digest([a, b]) == digest(a + b) != model_digest([b, a])


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
