"""The torch codecs give the bytes and values of the numpy reference, bit for bit."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from harness.member import pack_frames
from protocol import wire
from protocol.codecs import CODECS
from protocol.digest import Buffer
from protocol.errors import CodecError
from tests.support.cases import case
from worker.codecs import TORCH_CODECS, pack_fragment, round_trip, unpack_payload
from worker.codecs.torch_codecs import IN_TORCH

CPU = torch.device("cpu")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
any_float = st.floats(width=32)


def reference(codec: str, values: np.ndarray) -> np.ndarray | None:
    """The reference's bytes; None where it refuses."""
    raw = np.empty(CODECS[codec].size(len(values)), np.uint8)
    try:
        CODECS[codec].encode(values, raw)
    except CodecError:
        return None
    return raw


def assert_same(codec: str, values: np.ndarray) -> None:
    """Same bytes on every device, or refused by all; and the same values back."""
    for device in DEVICES:
        assert_same_on(torch.device(device), codec, values)


def assert_same_on(device: torch.device, codec: str, values: np.ndarray) -> None:
    expected = reference(codec, values)
    if expected is None:
        for codecs in (TORCH_CODECS, IN_TORCH):
            with pytest.raises(CodecError, match=codec):
                codecs[codec].encode(torch.from_numpy(values).to(device))
        return
    for codecs in (TORCH_CODECS, IN_TORCH):
        encoded = codecs[codec].encode(torch.from_numpy(values.copy()).to(device))
        assert encoded.cpu().numpy().tobytes() == expected.tobytes()
    decoded = np.empty_like(values)
    CODECS[codec].decode(expected, decoded)
    ours = TORCH_CODECS[codec].decode(encoded, len(values)).cpu().numpy()
    assert ours.tobytes() == decoded.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@given(values=arrays(np.float32, st.integers(1, 1100), elements=any_float, fill=finite))
@settings(max_examples=60, deadline=None)
def test_any_values(codec: str, values: np.ndarray) -> None:
    assert_same(codec, values)


@pytest.mark.parametrize("codec", CODECS)
def test_magnitudes_and_lengths(codec: str) -> None:
    for scale, n in product([1e-44, 1e-38, 1e-3, 1.0, 1e30, 3e38], [1, 255, 256, 257, 5000]):
        values = np.random.default_rng(n).standard_normal(n).astype(np.float32)
        with case(scale, n), np.errstate(over="ignore"):
            assert_same(codec, (values * np.float32(scale)).astype(np.float32))


@pytest.mark.parametrize("codec", CODECS)
@given(values=st.integers(1, 9000), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_equal_magnitudes(codec: str, values: int, seed: int) -> None:
    """Whoever sends only the largest must choose alike where many are the largest."""
    assert_same(codec, np.random.default_rng(seed).integers(-2, 3, values).astype(np.float32))


@pytest.mark.parametrize("codec", CODECS)
def test_not_finite(codec: str) -> None:
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        values = np.ones(600, np.float32)
        values[300] = bad
        with case(bad):
            assert_same(codec, values)
            with pytest.raises(CodecError):
                pack_fragment(torch.from_numpy(values), codec, zstd=True)


def payload_of(codec: Any, n: int, frames: list[Buffer]) -> wire.Payload:
    header = wire.StateHeader(
        run="r",
        round=0,
        fragment=0,
        codec=codec,
        elements=n,
        chunk_elements=wire.CHUNK_ELEMENTS,
        frame_bytes=[len(frame) for frame in frames],
    )
    return wire.Payload.from_bytes(b"".join([wire.pack_header(header), *frames]))


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("zstd", [False, True])
def test_several_chunks(codec: str, zstd: bool) -> None:
    n = 2 * wire.CHUNK_ELEMENTS + 777
    values = np.random.default_rng(0).standard_t(3, n).astype(np.float32)
    frames = pack_fragment(torch.from_numpy(values), codec, zstd=zstd)
    expected = pack_frames(values, CODECS[codec], zstd=zstd)
    assert [bytes(frame) for frame in frames] == [bytes(frame) for frame in expected]

    payload = payload_of(codec, n, frames)
    decoded = np.empty(n, np.float32)
    payload.decode(decoded)
    assert unpack_payload(payload, CPU, payload.header.elements).numpy().tobytes() == decoded.tobytes()
    assert round_trip(torch.from_numpy(values), codec).numpy().tobytes() == decoded.tobytes()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n", [1, 700, 4096])
def test_several_rows_are_encoded_as_each_alone(codec: str, n: int) -> None:
    rows = torch.from_numpy(np.random.default_rng(0).standard_t(3, (3, n)).astype(np.float32))
    for device in DEVICES:
        for codecs in (TORCH_CODECS, IN_TORCH):
            encode = codecs[codec].encode
            together = encode(rows.to(device)).cpu()
            assert torch.equal(together, torch.stack([encode(row.to(device)).cpu() for row in rows]))
