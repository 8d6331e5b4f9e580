"""docs/wire-format.md is true: its example, followed by hand, and its limits."""

import re
from pathlib import Path

import numpy as np

from protocol import wire
from protocol.codecs import CODECS, blocks
from protocol.digest import StateHash, content_digest, digest
from protocol.outer_step import outer_step

PAGE = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text(encoding="utf-8")


def example_payload() -> bytes:
    """The block marked hex; what stands right of two or more spaces after the bytes is commentary."""
    (block,) = re.findall(r"```hex\n(.*?)```", PAGE, re.DOTALL)
    rows = [re.match(r"\s*((?:[0-9a-f]{2} ?)+)(?: {2,}|$)", line) for line in block.splitlines()]
    return b"".join(bytes.fromhex(row[1]) for row in rows if row)


def test_the_example_is_what_this_package_writes_and_reads() -> None:
    theta, momentum = np.array([1, -2, 0.5, 0, 3], np.float32), np.zeros(5, np.float32)
    state = StateHash()
    state.update(theta.data, momentum.data)
    assert state.digest().hex() in PAGE

    values = np.array([0.5, -0.25, 0.125, 0, -1], np.float32)
    frames = wire.pack_frames(values, CODECS["int8"], zstd=True)
    header = wire.ContributionHeader(
        run="demo",
        round=0,
        fragment=0,
        codec="int8",
        elements=5,
        chunk_elements=wire.CHUNK_ELEMENTS,
        frame_bytes=[len(frame) for frame in frames],
        worker="a",
        base=state.digest(),
        tokens=2048,
        inner_steps=1,
        loss=5.5,
        norm=float(np.linalg.norm(values.astype(np.float64))),
        units=[[0, 1]],
        carried=[],
        carried_share=1.0,
    )
    example = example_payload()
    assert example.hex(" ") == (wire.pack_header(header) + b"".join(frames)).hex(" ")
    assert f"The payload, {len(example)} bytes" in PAGE
    assert digest(example).hex() in PAGE
    assert content_digest(digest(example)) in PAGE

    delta = np.zeros(5, np.float32)
    CODECS["int8"].accumulate(wire.Payload.from_bytes(example).chunk(0), np.float32(1), delta)
    outer_step(theta, momentum, delta, learning_rate=0.7, beta=0.9)
    assert f"θ   {theta.tobytes().hex(' ')}\nu   {momentum.tobytes().hex(' ')}\n" in PAGE


def test_the_limits_are_the_codes() -> None:
    for limit in (
        wire.MAX_HEADER_BYTES,
        wire.CHUNK_ELEMENTS,
        wire.MAX_FRAMES,
        wire.MAX_UNIT_RANGES,
        wire.MAX_CONTRIBUTORS,
    ):
        assert f"{limit:,}" in PAGE
    assert (wire.MAX_ELEMENTS, wire.MAX_CHUNK_ELEMENTS) == (1 << 31, 1 << 22)
    assert "1 to 2^31" in PAGE
    assert "1 to 2^22" in PAGE
    assert (f"`0x{blocks.MIN_SCALE_BITS:04X}`" in PAGE, f"`0x{blocks.MAX_SCALE_BITS:04X}`" in PAGE) == (True, True)
    assert f"Version {wire.VERSION}." in PAGE
    assert f"`{wire.MEDIA_TYPE}`" in PAGE


def test_every_field_is_in_a_table() -> None:
    for header in (wire.ContributionHeader, wire.DeltaHeader, wire.StateHeader):
        for field in header.model_fields:
            assert f"| `{field}` |" in PAGE
    for codec in CODECS:
        assert f"**`{codec}`**" in PAGE
