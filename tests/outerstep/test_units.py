import pytest

from outerstep.units import bytes_text, count_text, duration_text, loss_text


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
