"""The compiled kernels are the numpy reference, bit for bit, on every generation of CPUs that this one runs."""

import hashlib
import os
import shutil
import sysconfig
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from protocol.codecs import CODECS, REFERENCE
from protocol.codecs.blocks import MAX_SCALE_BITS, MIN_SCALE_BITS
from protocol.compiled import COMPILED, KERNELS, kernels
from protocol.errors import CodecError
from protocol.outer_step import in_numpy, outer_step, outer_step_by
from tests.support.cases import case
from tests.support.python import python

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

CODECS_IN_C = ("int8", "int4")
LENGTHS = st.integers(1, 1100) | st.sampled_from([255, 256, 257, 511, 512, 513, 1023, 1024, 1025])
FLOATS = st.floats(width=32)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
MAGNITUDES = [1e-44, 1e-42, 1e-38, 1e-20, 1e-3, 1.0, 1e20, 1e36, 1e38]


@pytest.fixture(params=kernels.generations() if COMPILED else ["none"])
def _generation(request: pytest.FixtureRequest) -> Iterator[None]:
    if COMPILED:
        kernels.use(request.param)
        yield
        kernels.use(kernels.generations()[0])
    else:
        yield


ON_EVERY_CPU = pytest.mark.usefixtures("_generation")


def encoded(name: str, values: F32) -> bytes | str:
    """By CODECS; the error's text where it refuses."""
    return _encoded(CODECS[name].encode, CODECS[name].size(len(values)), values)


def encoded_by_reference(name: str, values: F32) -> bytes | str:
    return _encoded(REFERENCE[name].encode, REFERENCE[name].size(len(values)), values)


def _encoded(encode, size: int, values: F32) -> bytes | str:
    out = np.full(size, 0x55, np.uint8)
    try:
        with np.errstate(all="ignore"):
            encode(values, out)
    except CodecError as error:
        return str(error)
    return out.tobytes()


@st.composite
def chunks(draw: st.DrawFn, name: str) -> tuple[U8, int]:
    """Bytes that may arrive: any scales that are allowed, any codes, those that no encoder writes among them; and n."""
    n = draw(LENGTHS)
    blocks = (n + 255) // 256
    scales = draw(arrays(np.uint16, blocks, elements=st.integers(MIN_SCALE_BITS, MAX_SCALE_BITS)))
    codes = draw(arrays(np.uint8, REFERENCE[name].size(n) - 2 * blocks, elements=st.integers(0, 255)))
    return np.concatenate([scales.astype("<u2").view(np.uint8), codes]), n


def test_they_are_compiled_where_there_is_a_compiler() -> None:
    """A fault in kernels.c or in setup.py would otherwise go unnoticed: installation goes on without them."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    can_compile = shutil.which(compiler) and Path(sysconfig.get_path("include"), "Python.h").exists()
    assert COMPILED or not can_compile, "compile them: pip install -e . or python setup.py build_ext --inplace"
    for name, codec in CODECS.items():
        assert (codec is not REFERENCE[name]) == (COMPILED and name in CODECS_IN_C)


@pytest.mark.slow
@ON_EVERY_CPU
@pytest.mark.parametrize("name", CODECS_IN_C)
@given(values=arrays(np.float32, LENGTHS, elements=FLOATS, fill=FINITE))
@example(values=np.full(300, -0.0, np.float32))
@settings(max_examples=150, deadline=None)
def test_encode(name: str, values: F32) -> None:
    assert encoded(name, values) == encoded_by_reference(name, values)


@ON_EVERY_CPU
@pytest.mark.parametrize("name", CODECS_IN_C)
def test_encode_magnitudes(name: str) -> None:
    """Blocks that differ, some of them all zeros, others with ties: multiples of half the scale."""
    for magnitude, n in product(MAGNITUDES, [1, 2, 255, 256, 257, 511, 513, 1000, 70_001]):
        random = np.random.default_rng(n)
        spread = np.repeat(np.exp(random.standard_normal(n // 256 + 1)), 256)[:n]
        with np.errstate(all="ignore"):
            values = (random.standard_normal(n) * spread * magnitude).astype(np.float32)
            values[256:512] = 0
            ties = (random.integers(-14, 15, 256) * (magnitude / 2)).astype(np.float32)
            values[512:768] = ties[: len(values[512:768])]
        with case(magnitude, n):
            assert encoded(name, values) == encoded_by_reference(name, values)


BAD = [np.nan, -np.nan, np.inf, -np.inf, float(np.finfo(np.float32).max)]


@ON_EVERY_CPU
@pytest.mark.parametrize("name", CODECS_IN_C)
def test_one_bad_value_anywhere(name: str) -> None:
    for bad, n in product(BAD, [1, 5, 256, 300, 777]):
        for position in {0, n // 2, n - 1, *range(0, n, 37)}:
            values = np.ones(n, np.float32)
            values[position] = bad
            with case(bad, n, position):
                assert encoded(name, values) == encoded_by_reference(name, values)
                assert isinstance(encoded(name, values), str)


@pytest.mark.slow
@ON_EVERY_CPU
@pytest.mark.parametrize("name", CODECS_IN_C)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_decode_and_accumulate(name: str, data: st.DataObject) -> None:
    chunk, n = data.draw(chunks(name))
    ours, theirs = np.empty(n, np.float32), np.empty(n, np.float32)
    CODECS[name].decode(chunk, ours)
    REFERENCE[name].decode(chunk, theirs)
    assert ours.tobytes() == theirs.tobytes()

    start = data.draw(arrays(np.float32, n, elements=FINITE, fill=FINITE))
    weight = np.float32(data.draw(st.floats(2.0**-100, 1.0, width=32)))
    ours, theirs = start.copy(), start.copy()
    with np.errstate(all="ignore"):
        CODECS[name].accumulate(chunk, weight, ours)
        REFERENCE[name].accumulate(chunk, weight, theirs)
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.slow
@ON_EVERY_CPU
@pytest.mark.parametrize("name", CODECS_IN_C)
@given(data=st.data(), rate=st.floats(0, 2), beta=st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_step(name: str, data: st.DataObject, rate: float, beta: float) -> None:
    """One that is decoded on the way, and one that is not."""
    chunk, n = data.draw(chunks(name))
    theta, momentum = (data.draw(arrays(np.float32, n, elements=FINITE, fill=FINITE)) for _ in range(2))
    delta = np.empty(n, np.float32)
    REFERENCE[name].decode(chunk, delta)
    by_chunk, by_delta = (theta.copy(), momentum.copy()), (theta.copy(), momentum.copy())
    with np.errstate(all="ignore"):
        outer_step_by(CODECS[name], chunk, *by_chunk, learning_rate=rate, beta=beta)
        outer_step(*by_delta, delta.copy(), learning_rate=rate, beta=beta)
        in_numpy(theta, momentum, delta, learning_rate=rate, beta=beta)
    for ours in (by_chunk, by_delta):
        assert ours[0].tobytes() == theta.tobytes()
        assert ours[1].tobytes() == momentum.tobytes()


@ON_EVERY_CPU
@pytest.mark.skipif(not COMPILED, reason="there are none, which another test notices")
@pytest.mark.parametrize("name", CODECS_IN_C)
@given(data=st.data(), at=st.integers(0, 200))
@settings(max_examples=100, deadline=None)
def test_sketch(name: str, data: st.DataObject, at: int) -> None:
    """Of an encoded chunk it is that of the decoded values, from any position on."""
    chunk, n = data.draw(chunks(name))
    decoded = np.empty(n, np.float32)
    REFERENCE[name].decode(chunk, decoded)
    signs = np.random.default_rng(n).integers(0, 256, (at + n) // 8 + 1, np.uint8)
    ours, by_value = ((np.ones(64, np.float32), np.zeros(16)) for _ in range(2))
    with np.errstate(all="ignore"):
        getattr(kernels, f"{name}_sketch")(chunk, n, at, signs, *ours)
        kernels.sketch(decoded, n, at, signs, *by_value)
    assert ours[0].tobytes() == by_value[0].tobytes()
    assert ours[1].tobytes() == by_value[1].tobytes()


X, OUT = np.ones(300, np.float32), np.zeros(304, np.uint8)
READ_ONLY = np.frombuffer(bytes(304), np.uint8)
ODD = np.frombuffer(bytearray(1201), np.uint8)[1:].view(np.float32)  # not where a float32 belongs


@pytest.mark.covers("security:kernel-bytes")
@pytest.mark.skipif(not COMPILED, reason="there are none, which another test notices")
@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("int8_encode", (X, OUT[:-1])),
        ("int8_encode", (X[:-1], OUT)),
        ("int4_encode", (X, OUT)),
        ("int8_encode", (X.astype(np.float64), OUT)),
        ("int8_encode", (X.view(np.int32), OUT)),
        ("int8_encode", (X, OUT.view(np.int8))),
        ("int8_encode", (X.byteswap().view(X.dtype.newbyteorder()), OUT)),
        ("int8_encode", (np.ones(600, np.float32)[::2], OUT)),
        ("int8_encode", (X.reshape(2, 150), OUT)),
        ("int8_encode", (X, READ_ONLY)),
        ("int8_encode", (ODD, OUT)),
        ("int8_encode", (X.tolist(), OUT)),
        ("int8_decode", (OUT[1:], X)),
        ("int8_decode", (X, OUT)),
        ("int4_decode", (OUT, X)),
        ("int8_accumulate", (OUT[1:], 0.5, X)),
        ("int8_accumulate", (OUT, "half", X)),
        ("int8_step", (OUT, X, X[1:].copy(), 0.7, 0.9)),
        ("int4_step", (OUT, X, X.copy(), 0.7, 0.9)),
        ("outer_step", (X.copy(), X.copy(), X[1:], 0.7, 0.9)),
        ("outer_step", (X.copy(), X[1:].copy(), X, 0.7, 0.9)),
        ("sketch", (X, 300, 0, OUT[:37], X[:256], np.zeros(16))),  # too few signs
        ("sketch", (X, 300, 5, OUT[:38], X[:256], np.zeros(16))),
        ("sketch", (X, 300, -1, OUT, X[:256], np.zeros(16))),
        ("sketch", (X, 299, 0, OUT, X[:256], np.zeros(16))),
        ("sketch", (X, 300, 0, OUT, X[:255], np.zeros(16))),
        ("sketch", (X, 300, 0, OUT, X[:0], np.zeros(16))),
        ("sketch", (X, 300, 0, OUT, X[:256], np.zeros(15))),
        ("sketch", (X, 300, 0, OUT, X[:256], np.zeros(16, np.float32))),
        ("sketch", (X, 300, 0, OUT, READ_ONLY[:256], np.zeros(16))),
        ("int8_sketch", (OUT, 301, 0, OUT, X[:256], np.zeros(16))),
        ("int8_sketch", (OUT, (1 << 63) - 1, 0, OUT, X[:256], np.zeros(16))),
        ("int8_sketch", (OUT, -1, 0, OUT, X[:256], np.zeros(16))),
        ("int8_sketch", (X, 300, 0, OUT, X[:256], np.zeros(16))),
        ("int4_sketch", (OUT, 300, 0, OUT, X[:256], np.zeros(16))),
        ("use", ("abacus",)),
    ],
)
def test_what_does_not_fit_is_refused(operation: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises((ValueError, TypeError, BufferError)):
        getattr(kernels, operation)(*arguments)
    assert not OUT.any()
    assert (X == 1).all()


@pytest.mark.skipif(not COMPILED, reason="there are none, which another test notices")
@pytest.mark.parametrize("size", [0, 304, 305])
def test_memory_is_let_go(size: int) -> None:
    """A bytearray cannot grow while somebody holds its memory."""
    data = bytearray(size)
    out = np.empty(300, np.float32)
    try:
        kernels.int8_decode(data, out)  # type: ignore[arg-type]
    except ValueError:
        assert size != 304
    data.append(0)


def results() -> str:
    """A digest of what the codecs and the outer step make of one fragment."""
    random = np.random.default_rng(5)
    digest = hashlib.sha256()
    for name in CODECS_IN_C:
        values, theta, momentum, mean = (random.standard_t(3, 5001).astype(np.float32) for _ in range(4))
        data = np.empty(CODECS[name].size(len(values)), np.uint8)
        CODECS[name].encode(values, data)
        CODECS[name].accumulate(data, np.float32(0.3), mean)
        outer_step_by(CODECS[name], data, theta, momentum, learning_rate=0.7, beta=0.9)
        outer_step(theta, momentum, mean, learning_rate=0.7, beta=0.9)
        for each in (data, theta, momentum):
            digest.update(each.tobytes())
    return digest.hexdigest()


@pytest.mark.slow
def test_without_them_numpy_gives_the_same() -> None:
    program = (
        "import sys; sys.modules['protocol.kernels'] = None\n"
        "from tests.protocol import test_kernels as this\n"
        "assert not this.COMPILED and this.CODECS == this.REFERENCE\n"
        "print(this.results(), this.KERNELS)"
    )
    done = python("-c", program)
    digest, _, told = done.stdout.strip().partition(" ")
    assert digest == results()
    assert "no C compiler" in told
    assert not COMPILED or KERNELS.startswith("compiled")
