import math
import re
from collections.abc import Callable

import pytest

from outerstep.common.quantities import (
    bytes_text,
    count_text,
    counted,
    duration_text,
    held_out_text,
    learning_rate_text,
    loss_text,
    natural,
    parse_count,
    parse_rate,
    parse_seconds,
    remaining_s,
    sparkline,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "–"),
        (0, "0"),
        (999, "999"),
        (999.6, "1 k"),
        (1000, "1 k"),
        (1234, "1.23 k"),
        (123_456, "123 k"),
        (999_499, "999 k"),
        (999_500, "1 M"),
        (139_584, "140 k"),
        (12_345_678, "12.3 M"),
        (-1500, "-1.5 k"),
        (2.5e18, "2.5e+03 P"),
    ],
)
def test_counts(count: float | None, text: str):
    assert count_text(count) == text


@pytest.mark.parametrize(("count", "text"), [(None, "–"), (0, "0 B"), (17, "17 B"), (1234, "1.23 kB"), (4e9, "4 GB")])
def test_bytes(count: float | None, text: str):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (2.94, "2.9 s"), (59.94, "59.9 s"), (59.99, "1 min 0 s"), (75.2, "1 min 15 s"), (7320, "2 h 2 min")],
)
def test_durations(seconds: float | None, text: str):
    assert duration_text(seconds) == text


def test_losses():
    assert (loss_text(None), loss_text(1.23456)) == ("–", "1.2346")
    assert held_out_text(1.23456, None) == "1.2346"
    assert held_out_text(1.23456, 1.78109) == "1.2346 (1.7811 bits/byte)"


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_count, "1.2e9", 1_200_000_000),
        (parse_count, "1.2B", 1_200_000_000),
        (parse_count, "500 k", 500_000),
        (parse_rate, "10mbit", 10e6),
        (parse_rate, "2.5 GBit", 2.5e9),
        (parse_seconds, "40ms", 0.04),
        (parse_seconds, "2min", 120.0),
    ],
)
def test_reading(parse: Callable[[str], float], text: str, value: float):
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (parse_rate, "10", "'10' is not a rate in bits per second such as 10mbit or 2.5Gbit/s"),
        (parse_rate, "10MB/s", "is not a rate in bits per second"),  # bytes: eight times as much, so not guessed at
        (parse_rate, "0mbit", "is too small"),
        (parse_count, "-3", "is not a number such as 1.2e9"),
        (parse_count, "1e999", "is too large"),
        (parse_seconds, "nan", "is not a time"),
    ],
)
def test_what_cannot_be_read_is_told(parse: Callable[[str], float], text: str, said: str):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(text)


@pytest.mark.parametrize(
    ("losses", "bars"),
    [
        ([], "–"),
        ([None, None], "–"),
        ([4.0, 3.0, 2.0, 1.0], "█▆▃▁"),
        ([4.0, None, 1.0, math.nan], "█–▁–"),
        ([2.0, 2.0], "▁▁"),
        ([9.0, *[1.0] * 20], "▁" * 20),
    ],
)
def test_losses_as_bars(losses: list[float | None], bars: str):
    assert sparkline(losses) == bars


def test_what_is_to_go():
    assert remaining_s([5.0, 5.0, 3600.0, 5.0], 6) == 30.0, "a pause is no pace"
    assert remaining_s([5.0], 6, spent_s=2.0) == 28.0
    assert remaining_s([5.0], 6, spent_s=9.0) == 25.0, "the round that is overdue is over at once"
    assert remaining_s([5.0], 6, spent_s=31.0) is None, "it is so late that it tells nothing of the others"
    assert remaining_s([0.1], 6, spent_s=29.0) == 0.5, "of short rounds a moment is not late"
    assert remaining_s([5.0], 0, spent_s=9.0) == 0.0
    assert remaining_s([], 6) is None
    assert remaining_s([5.0], -1) is None, "nobody has said how many rounds there are"
    assert (learning_rate_text(0.00038), learning_rate_text(None)) == ("3.80e-04", "–")


def test_names_are_sorted_as_people_count():
    names = ["box-14", "box-4", "box-04", "a", "box-4b", "10", "9", "box-4.12", "box-4.2", "", "box-" + "9" * 5000]
    in_order = ["", "9", "10", "a", "box-04", "box-4", "box-4.2", "box-4.12", "box-4b", "box-14", "box-" + "9" * 5000]
    assert sorted(names, key=natural) == in_order


def test_one_of_something_is_no_plural():
    assert [counted(number, "worker") for number in (0, 1, 2)] == ["0 workers", "1 worker", "2 workers"]
