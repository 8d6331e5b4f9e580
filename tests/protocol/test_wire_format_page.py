"""The example and the limits in docs/wire-format.md agree with the code."""

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from protocol import wire
from protocol.codecs import CODECS, blocks
from protocol.digest import StateHash, content_digest, digest, model_digest
from protocol.outer_step import outer_step

PAGE = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text(encoding="utf-8")
TEXT = " ".join(PAGE.split())  # without line breaks
ROW = re.compile(r"\s*((?:[0-9a-f]{2} ?)+)(?: {2,}|$)")
F32 = npt.NDArray[np.float32]


def example_payloads() -> list[bytes]:
    """Return the bytes of the blocks marked hex; text after two or more spaces is a comment."""
    return [
        b"".join(bytes.fromhex(row[1]) for line in block.splitlines() if (row := ROW.match(line)))
        for block in re.findall(r"```hex\n(.*?)```", PAGE, re.DOTALL)
    ]


def test_the_example_is_what_this_package_writes_and_reads() -> None:
    theta, momentum = np.array([1, -2, 0.5, 0, 3], np.float32), np.zeros(5, np.float32)
    base = state_digest(theta, momentum)
    assert base.hex() in PAGE
    contribution, delta = example_payloads()

    values = np.array([0.5, -0.25, 0.125, 0, -1], np.float32)
    frames = wire.pack_frames(values, CODECS["int8"], zstd=True)
    common = {
        "run": "demo",
        "round": 0,
        "fragment": 0,
        "codec": "int8",
        "elements": 5,
        "chunk_elements": wire.CHUNK_ELEMENTS,
    }
    header = wire.ContributionHeader.model_validate(
        {
            **common,
            "frame_bytes": [len(frame) for frame in frames],
            "worker": "a",
            "base": base,
            "tokens": 2048,
            "inner_steps": 1,
            "loss": 5.5,
            "norm": float(np.linalg.norm(values.astype(np.float64))),
            "units": [[0, 1]],
            "carried": [],
            "carried_share": 1.0,
        }
    )
    assert contribution.hex(" ") == (wire.pack_header(header) + b"".join(frames)).hex(" ")
    assert f"The payload, {len(contribution)} bytes" in TEXT
    assert digest(contribution).hex() in PAGE
    assert content_digest(digest(contribution)) in PAGE

    # The published rules in order: the mean, its encoding, the decoded values, and the outer step.
    mean = np.zeros(5, np.float32)
    CODECS["int8"].accumulate(wire.Payload.from_bytes(contribution).chunk(0), np.float32(2048 / 2048), mean)
    assert f"the accumulator is ({in_words(mean)})" in TEXT
    frames = wire.pack_frames(mean, CODECS["int8"], zstd=True)
    contributors = [{"worker": "a", "tokens": 2048, "factor": 1.0}]
    published = wire.DeltaHeader.model_validate(
        {**common, "frame_bytes": [len(frame) for frame in frames], "base": base, "contributors": contributors}
    )
    assert delta.hex(" ") == (wire.pack_header(published) + b"".join(frames)).hex(" ")
    assert f"The delta, {len(delta)} bytes" in TEXT

    decoded = np.empty(5, np.float32)
    wire.Payload.from_bytes(delta).decode(decoded)
    assert decoded.tobytes() != mean.tobytes(), "the delta's encoding changes nothing, so nothing is proved"
    assert f"It decodes to ({in_words(decoded)})" in TEXT
    outer_step(theta, momentum, decoded, learning_rate=0.7, beta=0.9)
    assert f"θ   {theta.tobytes().hex(' ')}\nu   {momentum.tobytes().hex(' ')}\n" in PAGE
    assert state_digest(theta, momentum).hex() in PAGE
    assert model_digest([state_digest(theta, momentum)]).hex() in PAGE


def state_digest(theta: F32, momentum: F32) -> bytes:
    state = StateHash()
    state.update(theta.data, momentum.data)
    return state.digest()


def in_words(values: F32) -> str:
    """Return values with eight decimals, as the page has them."""
    return ", ".join(f"{value:.8f}".rstrip("0").rstrip(".").replace("-", "−") for value in values.tolist())


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
