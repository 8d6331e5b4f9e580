"""Codecs: literal bytes in both directions, exact sizes, and the arithmetic that docs/wire-format.md gives."""

from fractions import Fraction
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from protocol.codecs import CODECS
from protocol.errors import CodecError, WireError
from protocol.wire import MAX_FINITE
from tests.support.cases import case

F32 = npt.NDArray[np.float32]
NAMES = sorted(CODECS)
INT8_LIMIT = 127 * 2.0**120
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


GOLDEN: list[tuple[str, list[float], str, list[float]]] = [
    ("fp32", [1.0, -2.5, 2**-149, -0.0], "0000803f 000020c0 01000000 00000080", [1.0, -2.5, 2**-149, -0.0]),
    # Ties go to even: 1 + 2^-8 down, 1 + 3·2^-8 up; just above the tie up.
    ("bf16", [1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-23, -2.5], "803f 803f 823f 813f 20c0", [1, 1, 1.015625, 1.0078125, -2.5]),
    # absmax 1: the scale is 1/127 rounded up to 0x3C02.
    ("int8", [0.5, -0.25, 0.125, 0.0, -1.0], "023c 3f e0 10 00 82", [0.4998779296875, -0.25390625, 0.126953125, 0.0, -0.999755859375]),
    # Scale exactly 1; codes are rounded to even: 0.5 -> 0, 1.5 -> 2, 2.5 -> 2.
    ("int8", [127.0, 0.5, 1.5, 2.5, -126.5], "803f 7f 00 02 02 82", [127, 0, 2, 2, -126]),
    # Nothing but zeros, and values below every scale: the least scale, 2^-126.
    ("int8", [0.0, -0.0, 1e-45], "8000 00 00 00", [0.0, 0.0, 0.0]),
    # The largest that can be held.
    ("int8", [INT8_LIMIT, -INT8_LIMIT], "807b 7f 81", [INT8_LIMIT, -INT8_LIMIT]),
    # The first half in the lower nibbles, the second half in the upper ones; an odd number leaves the last one 0.
    ("int4", [7.0, -7.0, 1.0, -1.0], "803f 17 f9", [7, -7, 1, -1]),
    ("int4", [7.0, 0.5, 1.5, -6.5, 2.5], "803f a7 20 02", [7, 0, 2, -6, 2]),
    ("int4", [0.0], "8000 00", [0.0]),
    # 1/7 rounded up to 0x3E13.
    ("int4", [-1.0, 0.5], "133e 39", [-1.0048828125, 0.4306640625]),
    # RMS 71.6: the scale is 71.6/64 rounded down to 1 + 15/128; halfway between the levels is 70.4.
    ("2bit", [29.0, -29.0, 97.0, -97.0], "8f3f d8", [32.3984375, -32.3984375, 108.3671875, -108.3671875]),
    # Four quarters side by side, here of two values each: bytes of the values 0, 2, 4 and 1, 3.
    ("2bit", [-1.0, 2.0, -2.0, 2.0, -1.0], "d63c 2e 05", [-0.757568359375, 2.533935546875, -2.533935546875, 2.533935546875, -0.757568359375]),
    # Nothing has no sign: the least level.
    ("2bit", [0.0, -0.0], "8000 00", [29 * 2.0**-126] * 2),
    # RMS 0.75: what is at least that is sent.
    ("ternary", [1.0, -1.0, 0.0, 0.5], "903f 0d", [1.125, -1.125, 0, 0]),
    ("ternary", [1.0, 1.0, 1.0, 1.0, -1.0], "c03f 35 05", [1.5, 1.5, 1.5, 1.5, -1.5]),
    ("ternary", [0.0, -0.0], "8000 00", [0.0, 0.0]),
    # Of five values one, 4 of 64: mean 1, scale 1/8, and 1 is nearer to 7/8 than to 10/8.
    ("sparse", [0.5, -0.25, 0.125, 0.0, -1.0], "003e 01 04 02", [0, 0, 0, 0, -0.875]),
    ("sparse", [0.0, -0.0], "8000 00 00 00", [0.0, 0.0]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "values", "encoded", "decoded"), GOLDEN)
def test_golden_bytes(name: str, values: list[float], encoded: str, decoded: list[float]) -> None:
    raw = encode(name, np.array(values, np.float32))
    assert raw.tobytes() == bytes.fromhex(encoded)
    assert decode(name, raw, len(values)).tolist() == decoded
    CODECS[name].check(raw, len(values), MAX_FINITE)


def test_int8_scales_of_all_blocks_precede_the_codes() -> None:
    values = np.zeros(258, np.float32)
    values[0], values[256], values[257] = 127, 254, -2
    assert encode("int8", values).tobytes() == bytes.fromhex("803f 0040 7f") + bytes(255) + bytes.fromhex("7f ff")


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


@given(floats())
def test_fp32_is_lossless(values: F32) -> None:
    assert decode("fp32", encode("fp32", values), len(values)).tobytes() == values.tobytes()


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


@given(st.lists(st.integers(-7, 7), min_size=1, max_size=600))
def test_int4_keeps_whole_numbers_in_their_places(values: list[int]) -> None:
    """With a 7 in each block the scale is 1."""
    for start in range(0, len(values), 256):
        values[start] = 7
    assert decode("int4", encode("int4", np.array(values, np.float32)), len(values)).tolist() == values


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


@given(seed=st.integers(0, 1000), n=st.sampled_from([1, 64, 65, 4095, 4096, 4097, 9000]))
@settings(max_examples=40)
def test_sparse_sends_the_largest_of_each_block(seed: int, n: int) -> None:
    values = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    decoded = decode("sparse", encode("sparse", values), n)
    for start in range(0, n, 4096):
        block, sent = values[start : start + 4096], decoded[start : start + 4096]
        k = (len(block) + 63) // 64
        largest = np.argsort(-np.abs(block), kind="stable")[:k]
        scale = np.abs(block[largest]).mean() / 8
        assert set(np.flatnonzero(sent)) == set(largest[np.abs(block[largest]) >= 3.5 * scale * 0.99])
        assert (np.sign(sent[largest]) * np.sign(block[largest]) >= 0).all()
        levels = np.abs(sent[sent != 0]) / scale
        assert ((np.abs(levels - 7) < 0.07) | (np.abs(levels - 10) < 0.1)).all()


@given(floats(limit=INT8_LIMIT))
def test_int8_decoding_does_not_round(values: F32) -> None:
    raw = encode("int8", values)
    blocks = (len(values) + 255) // 256
    exact = raw[2 * blocks :].view(np.int8).astype(np.float64) * np.repeat(scales_of(raw, blocks), 256)[: len(values)]
    decoded = decode("int8", raw, len(values))
    assert (decoded.astype(np.float64) == exact).all()
    assert ((decoded == 0) | (np.abs(decoded) >= np.float32(2.0**-126))).all(), "a decoded value is denormal"


@pytest.mark.parametrize("name", NAMES)
@given(values=floats(limit=2.0**55), data=st.data())
@settings(max_examples=50)
def test_accumulate_is_the_documented_arithmetic(name: str, values: F32, data: st.DataObject) -> None:
    """Written out per element: fp32 and bf16 add fl(w·x), the others add fl(q · fl(w·s))."""
    n = len(values)
    weight = np.float32(data.draw(st.integers(1, 1000)) / data.draw(st.integers(1000, 3000)))
    start = np.resize(data.draw(floats(limit=2.0**55)), n).astype(np.float32)
    raw = encode(name, values)
    acc = start.copy()
    CODECS[name].accumulate(raw, weight, acc)

    for i in {0, n // 2, n - 1, min(255, n - 1), min(256, n - 1)}:
        if name == "sparse":
            scale = np.uint32(int(raw[0]) << 16 | int(raw[1]) << 24).view(np.float32)
            addend = np.float32(decode(name, raw, n)[i] / scale) * np.float32(weight * scale)
        elif name in ("2bit", "ternary") or name in MOST:
            block = 64 if name == "ternary" else 256
            scale = np.uint32(int(raw[2 * (i // block)]) << 16 | int(raw[2 * (i // block) + 1]) << 24).view(np.float32)
            code = np.float32(decode(name, raw, n)[i] / scale)
            addend = code * np.float32(weight * scale)
        else:
            addend = weight * decode(name, raw, n)[i]
        expected = np.float32(start[i]) + np.float32(addend)
        if name == "sparse" and decode(name, raw, n)[i] == 0:
            expected = start[i]  # what is not sent is not added: a start of -0 stays -0
        assert acc[i].tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_infinity_are_the_callers_fault(name: str) -> None:
    for bad, position in product([np.nan, -np.nan, np.inf, -np.inf], [0, 255, 256, 299]):
        values = np.ones(300, np.float32)
        values[position] = bad
        with case(bad, position), pytest.raises(CodecError, match=name):
            encode(name, values)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("bf16", 0x7F7F8000),  # rounds up to infinity
        ("bf16", 0x7FFFFFFF),  # a NaN whose rounding overflows to a finite pattern
        ("bf16", 0xFFFFFFFF),
        ("int8", 0x7EFE0001),  # one more than 127 · 2^120 + its rounding
        ("int8", 0x7F7FFFFF),  # the largest finite number
        ("int4", 0x7CE00001),  # one more than 7 · 2^120
        ("2bit", 0x60000000),  # its square is infinite
        ("ternary", 0x60000000),
        ("sparse", 0x7F000000),  # the scale would be more than 2^120
    ],
)
def test_values_that_a_codec_cannot_hold(name: str, bits: int) -> None:
    with pytest.raises(CodecError):
        encode(name, np.array([bits], np.uint32).view(np.float32))


@pytest.mark.parametrize(
    ("name", "n", "encoded"),
    [
        ("fp32", 1, "0000c07f"),
        ("fp32", 1, "000080ff"),
        ("bf16", 1, "807f"),
        ("bf16", 1, "c0ff"),
        ("int8", 1, "0000 01"),  # scale 0
        ("int8", 1, "7f00 01"),  # a denormal scale
        ("int8", 1, "817b 01"),  # more than 2^120
        ("int8", 1, "803f 80"),  # code -128
        ("int8", 1, "80bf 01"),  # a negative scale
        ("int8", 1, "c07f 01"),  # NaN
        ("int4", 2, "0000 11"),
        ("int4", 2, "817b 11"),
        ("int4", 2, "803f 18"),  # code -8 in the lower half
        ("int4", 2, "803f 81"),  # and in the upper one
        ("int4", 1, "803f 11"),  # a second code, but one value
        ("2bit", 4, "7f00 00"),
        ("2bit", 4, "817b 00"),
        ("2bit", 3, "803f 40"),  # a fourth code, but three values
        ("2bit", 5, "803f 00 10"),
        ("ternary", 4, "7f00 00"),
        ("ternary", 4, "817b 00"),
        ("ternary", 4, "803f 02"),  # code -2
        ("ternary", 4, "803f 80"),
        ("ternary", 3, "803f 40"),
        ("sparse", 128, "7f00 05 0000 00"),
        ("sparse", 128, "817b 05 0000 00"),
        ("sparse", 128, "803f 07 0000 00"),  # three indices, two at most
        ("sparse", 128, "803f 03 0000 00"),  # index 0 twice
        ("sparse", 128, "803f 03 0100 00"),  # 1, then 0
        ("sparse", 127, "803f 04 3f00 00"),  # index 127
        ("sparse", 128, "803f 10 0000 00"),  # a bit beyond the last, which stands for index 256
        ("sparse", 128, "803f 01 4000 00"),  # one index, a second one's lower bits
        ("sparse", 128, "803f 01 0000 04"),  # one index, a second value
        ("sparse", 128, "803f 01 0010 00"),
    ],
)
def test_bytes_that_no_encoder_writes_are_the_peers_fault(name: str, n: int, encoded: str) -> None:
    with pytest.raises(WireError, match=name):
        CODECS[name].check(np.frombuffer(bytes.fromhex(encoded), np.uint8), n, MAX_FINITE)


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
