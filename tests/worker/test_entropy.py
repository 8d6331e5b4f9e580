"""Uploads are coded by zstd where that shortens their way, by what was measured on the way of those before them."""

import logging

import numpy as np
import pytest
import torch
from torch import Tensor

from protocol import wire
from protocol.digest import Buffer
from worker.codecs import pack_fragment
from worker.tuning import entropy
from worker.tuning.entropy import PROBE_EVERY, Entropy, Rate

CHUNK = 400_000
CODER = 1e9  # bytes per second
FAST, SLOW = 1e9, 1e6
GAUSSIAN = torch.randn(3 * CHUNK, generator=torch.Generator().manual_seed(0))


class Clock:
    """Moves while something is coded or sent, by what the rates say."""

    def __init__(self) -> None:
        self.seconds, self.coded_chunks = 0.0, 0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, pack_frame = Clock(), wire.pack_frame

    def timed(raw: np.ndarray, *, zstd: bool) -> Buffer:
        clock.seconds += len(raw) / CODER if zstd else 0.0
        clock.coded_chunks += zstd
        return pack_frame(raw, zstd=zstd)

    monkeypatch.setattr(wire, "pack_frame", timed)
    monkeypatch.setattr(wire, "CHUNK_ELEMENTS", CHUNK)
    return clock


def send(uploads: Entropy, clock: Clock, rate: float, vector: Tensor = GAUSSIAN) -> int:
    """Pack a fragment and send it over a line of `rate`, bytes per second; how many of its chunks were coded."""
    before = clock.coded_chunks
    sent = sum(len(frame) for frame in uploads.pack(vector, "int8", wanted=True))
    uploads.line.add(sent, sent / rate)
    return clock.coded_chunks - before


def test_the_first_fragment_is_coded_and_then_the_line_decides(clock: Clock) -> None:
    on_fast, on_slow = Entropy(Rate(), clock), Entropy(Rate(), clock)
    assert [send(on_fast, clock, FAST) for _ in range(5)] == [3, 0, 0, 0, 0]
    assert [send(on_slow, clock, SLOW) for _ in range(5)] == [3, 3, 3, 3, 3]


def test_a_line_that_becomes_slow_or_fast_again_is_noticed_with_the_next_fragment(clock: Clock) -> None:
    uploads = Entropy(Rate(), clock)
    rates = [FAST, FAST, SLOW, SLOW, *[FAST] * 16]
    coded = [send(uploads, clock, rate) for rate in rates]
    assert coded[:5] == [3, 0, 0, 3, 3], "after the first body at the new rate"
    assert coded[-1] == 0, "old measurements fade"


def test_the_border_lies_where_coding_takes_as_long_as_the_line_for_what_it_saves(clock: Clock) -> None:
    raw, packed = (sum(map(len, pack_fragment(GAUSSIAN, "int8", zstd=zstd))) for zstd in (False, True))
    border = CODER * (raw - packed) / raw
    for rate, coded in ((0.99 * border, 3), (1.01 * border, 0)):
        uploads = Entropy(Rate(), clock)
        send(uploads, clock, rate)
        assert send(uploads, clock, rate) == coded


def test_data_that_become_compressible_are_noticed_by_coding_a_fragment_now_and_then(clock: Clock) -> None:
    uploads, zeros = Entropy(Rate(), clock), torch.zeros(3 * CHUNK)
    rate = CODER / 4  # above the border of Gaussian values, below that of zeros
    assert [send(uploads, clock, rate) for _ in range(3)] == [3, 0, 0]
    coded = [send(uploads, clock, rate, zeros) for _ in range(PROBE_EVERY + 1)]
    assert coded == [0] * (PROBE_EVERY - 3) + [3] * 4


@pytest.mark.parametrize(("rate", "wanted", "coded"), [(FAST, True, False), (SLOW, True, True), (SLOW, False, False)])
def test_a_fragment_is_packed_as_it_is_or_coded(clock: Clock, rate: float, wanted: bool, coded: bool) -> None:
    uploads = Entropy(Rate(), clock)
    before = send(uploads, clock, rate)
    packed = uploads.pack(GAUSSIAN, "int8", wanted=wanted)
    assert clock.coded_chunks == (2 if coded else 1) * before
    assert packed == pack_fragment(GAUSSIAN, "int8", zstd=coded)


def test_the_choice_is_told_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    uploads = Entropy(Rate(), clock)
    for rate in (FAST, FAST, FAST, SLOW, SLOW, SLOW):
        send(uploads, clock, rate)
    told = [record.getMessage() for record in caplog.records if record.name == entropy.__name__]
    assert [line.split(" zstd, which saves ")[0] for line in told] == ["uploads: without", "uploads: with"]
    assert told[0].endswith(" MB/s; the line sends 1000.00 MB/s")
