"""Codecs: exact sizes, and bounds on what encoding changes. Their bytes are in docs/vectors (test_vectors.py)."""

from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from protocol.codecs import CODECS
from protocol.errors import WireError
from protocol.wire import MAX_FINITE

pytestmark = pytest.mark.slow

F32 = npt.NDArray[np.float32]
NAMES = sorted(CODECS)
MOST = {"int8": 127, "int4": 7}


def encode(name: str, values: F32) -> npt.NDArray[np.uint8]:
    raw = np.empty(CODECS[name].size(len(values)), np.uint8)
    CODECS[name].encode(values, raw)
    return raw


def decode(name: str, raw: npt.NDArray[np.uint8], n: int) -> F32:
    out = np.empty(n, np.float32)
    CODECS[name].decode(raw, out)
    return out


def floats(limit: float = float(np.finfo(np.float32).max)) -> st.SearchStrategy[F32]:
    """float32 vectors around the block boundary, denormals and signed zeros included."""
    return npst.arrays(
        np.float32,
        st.sampled_from([1, 2, 255, 256, 257, 600]),
        elements=st.floats(-limit, limit, width=32) | st.floats(-1, 1, width=32),
        fill=st.floats(-1, 1, width=32),
    )


@pytest.mark.parametrize("name", NAMES)
@given(n=st.integers(1, 1 << 22))
def test_size(name: str, n: int) -> None:
    expected = {"fp32": 4 * n, "bf16": 2 * n, "int8": n + 2 * ((n + 255) // 256)}
    expected["int4"] = (n + 1) // 2 + 2 * ((n + 255) // 256)
    expected["2bit"] = (n + 3) // 4 + 2 * ((n + 255) // 256)
    expected["ternary"] = (n + 3) // 4 + 2 * ((n + 63) // 64)
    m = (n + 63) // 64
    expected["sparse"] = 2 * ((n + 4095) // 4096) + (m + 3) // 4 + (3 * m + 3) // 4 + (m + 3) // 4
    assert CODECS[name].size(n) == expected[name]


@given(floats(limit=2.0**127))
def test_bf16_rounds_to_nearest_even(values: F32) -> None:
    """Against exact rational arithmetic: of the two neighbours the nearer, at a tie the even one."""
    decoded = decode("bf16", encode("bf16", values), len(values))
    for x, y in zip(values[:40], decoded[:40], strict=True):
        low_bits = int(x.view(np.uint32)) & 0xFFFF0000
        below, above = (np.uint32(bits).view(np.float32) for bits in (low_bits, low_bits + 0x10000))
        to_below, to_above = (abs(Fraction(float(x)) - Fraction(float(z))) for z in (below, above))
        even = below if (low_bits >> 16) % 2 == 0 else above
        nearest = below if to_below < to_above else above if to_above < to_below else even
        assert y.view(np.uint32) == nearest.view(np.uint32)


def scales_of(raw: npt.NDArray[np.uint8], blocks: int) -> npt.NDArray[np.float64]:
    return (raw[: 2 * blocks].view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("name", sorted(MOST))
@given(values=floats(limit=7 * 2.0**120))
@settings(max_examples=150)
def test_round_trip_error_is_at_most_half_a_step(name: str, values: F32) -> None:
    """Half a step of the block's scale; x · (1/s) is rounded twice, which adds less than 2^-16 of a step."""
    raw = encode(name, values)
    CODECS[name].check(raw, len(values), MAX_FINITE)
    blocks = (len(values) + 255) // 256
    scales = scales_of(raw, blocks)
    step = np.repeat(scales, 256)[: len(values)]
    error = np.abs(values.astype(np.float64) - decode(name, raw, len(values)))
    assert (error <= (0.5 + 2**-16) * step).all()
    # And no step is larger than its block needs: 1/127 or 1/7 of the largest value, rounded up to 8 significant bits.
    for j in range(blocks):
        absmax = float(np.abs(values[256 * j : 256 * (j + 1)]).max())
        assert scales[j] <= max(absmax / MOST[name] * (1 + 2**-7) * (1 + 2**-23), 2.0**-126)


@pytest.mark.parametrize("name", [name for name in NAMES if CODECS[name].error_feedback])
@given(values=floats(limit=2.0**55))
@settings(max_examples=60)
def test_what_is_left_out_is_less_than_what_there_was(name: str, values: F32) -> None:
    """Otherwise what a worker carries over would grow without end. 2bit has no 0: what it makes of small values adds at
    most (29/64)² of a block's squares; the next round takes it back."""
    left = values - decode(name, encode(name, values), len(values))
    if name == "2bit":
        for start in range(0, len(values), 256):
            before, after = (np.square(x[start : start + 256], dtype=np.float64).sum() for x in (values, left))
            assert after <= before * (1 + (29 / 64) ** 2) + 1e-60
    else:
        assert (np.abs(left) <= np.abs(values) + np.float32(2.0**-126)).all()


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_what_passes_the_check_decodes_to_finite_values(name: str, data: st.DataObject) -> None:
    n = data.draw(st.sampled_from([1, 3, 256, 257]))
    raw = np.frombuffer(data.draw(st.binary(min_size=CODECS[name].size(n), max_size=CODECS[name].size(n))), np.uint8)
    try:
        CODECS[name].check(raw, n, MAX_FINITE)
    except WireError:
        return
    assert np.isfinite(decode(name, raw, n)).all()
