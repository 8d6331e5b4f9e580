"""`outerstep plan --box`: what each of several boxes adds, against what was measured."""

import json

import pytest

from outerstep.plan_boxes import OUTER, Box, Together, parse_box, together
from tests.outerstep.conftest import outerstep


def fast(*speeds: float) -> list[Box]:
    return [Box(speed, 1e9, 1e9) for speed in speeds]


def planned(boxes: list[Box], parameters: int = 1_000_000, step_s: float = 1.0) -> Together:
    return together(parameters, step_s, boxes, 0.04, 0.0)


@pytest.mark.parametrize(
    ("speeds", "measured"),
    [((1,), 0.82), ((1, 1), 0.718), ((1, 0.5), 0.851), ((1, 0.2), 0.872), ((1, 0.05), 0.900)],
)
def test_it_predicts_what_the_benchmark_measured(speeds: tuple[float, ...], measured: float):
    """`python -m benchmarks.boxes real`, and `floor` for a single box, as in docs/performance.md. Only ratios of speeds
    count."""
    assert planned(fast(*speeds)).time == pytest.approx(measured, rel=0.07)
    assert planned(fast(*(3 * each for each in speeds))).time == pytest.approx(planned(fast(*speeds)).time)


@pytest.mark.parametrize(
    ("mbit", "share", "speed", "measured"),
    [
        (2.4, 0.1, 1, 0.691 / 0.681),
        (2.4, 0.1, 0.5, 0.782 / 0.777),
        (2.4, 0.1, 0.2, 0.819 / 0.827),
        (0.46, 0.5, 1, 0.751 / 0.681),
        (0.46, 0.5, 0.5, 0.872 / 0.777),
        (0.46, 0.5, 0.2, 0.850 / 0.827),
    ],
)
def test_what_is_trained_during_a_sync_is_worth_less(mbit: float, share: float, speed: float, measured: float):
    """`python -m benchmarks.boxes floor --delay 0.5`, over `floor` without it; over this line a sync takes that share
    of a round."""
    found = planned([Box(each, 1e9, mbit * 1e6) for each in (1, speed)], parameters=15_000_000)
    assert found.boxes[0].sync_s / found.round_s == pytest.approx(share, rel=0.1)
    assert found.time / planned(fast(1, speed)).time == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(
    ("speeds", "measured"), [((1, 1), 0.74), ((1, 0.5), 0.87), ((1, 0.2), 0.86), ((1, 0.05), 0.93)]
)
def test_it_is_within_10_percent_of_runs_over_a_line(speeds: tuple[float, ...], measured: float):
    """`benchmarks.boxes real --line 10/1`: rounds of 10 s, payloads of 1.1 s; the last one with a momentum of 0.8."""
    boxes = [Box(each, 10e6, 1e6) for each in speeds]
    assert together(139_584, 0.02, boxes, 0.04, 0.0).time == pytest.approx(measured, rel=0.1)


def test_each_box_has_its_share_and_the_time_without_it():
    found = planned(fast(1, 0.5, 0.5))
    assert [each.inner_steps for each in found.boxes] == [500, 250, 250]
    assert [each.tokens for each in found.boxes] == [0.5, 0.25, 0.25]
    expected = [planned(fast(*speeds)).time for speeds in ((1,), (1, 0.5), (1, 0.5))]
    assert [each.without for each in found.boxes] == pytest.approx(expected, rel=0.01)
    assert planned(fast(1)).boxes[0].without is None


def test_a_box_trains_on_during_its_sync_for_four_rounds_and_then_waits():
    """A round takes 500 s. 1e9 values of a byte take 800 s at 10 Mbit/s, and 8000 s at 1 Mbit/s."""
    [near, far] = planned([Box(1, 1e9, 10e6), Box(1, 1e9, 1e6)], parameters=1_000_000_000).boxes
    assert near.sync_s == pytest.approx(800, rel=0.1)
    assert near.training == 1
    assert far.training == pytest.approx(4 * 500 / far.sync_s)
    assert far.tokens == pytest.approx(far.training / (1 + far.training))
    alone = planned([Box(1, 1e9, 1e6)], parameters=1_000_000_000)
    assert alone.time == pytest.approx(OUTER / far.training), "it trains as much in more time"


@pytest.mark.parametrize(
    "text", ["0.5", "0.5,100", "0.5,100mbit/10mbit", "0,100/10", "1,100/0", "-1,100/10", "1;100/10"]
)
def test_what_is_no_box(text: str):
    with pytest.raises(ValueError, match=r"is not a box such as 0\.5,100/10"):
        parse_box(text)


GIVEN = ["--params", "124e6", "--step-time", "0.5", "--box", "1.0,100/10", "--box", "0.5,50/5"]


def test_the_command_prints_a_row_per_box_and_the_time_together():
    code, out, err = outerstep("plan", *GIVEN)
    assert code == 0, err
    assert out.splitlines()[2].split()[:4] == ["2", "0.5", "50/5", "250"]
    assert "in about 0.89 of its time" in out
    assert "trains on during its sync, for up to 4 rounds' time" in out
    assert "waits for its line" not in out
    document = json.loads(outerstep("plan", *GIVEN, "--format", "json")[1])
    assert [each["box"] for each in document["boxes"]] == [
        {"speed": 1.0, "down": 100e6, "up": 10e6},
        {"speed": 0.5, "down": 50e6, "up": 5e6},
    ]
    slow = outerstep("plan", "--params", "7e9", "--step-time", "1", "--box", "1,100/10")[1]
    assert "waits for its line; with sync.inner_steps = 1367 none would" in slow


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*GIVEN, "--up", "10mbit"], "each --box has its line: leave out --up"),
        ([*GIVEN, "--steps", "2000"], "only with the default settings: leave out --steps"),
        (["--box", "1,100/10"], "--box needs --params and the --step-time of the fastest box"),
        ([*GIVEN, "--memory", "24gb"], "leave out --step-time, --box"),
    ],
)
def test_what_cannot_be_meant_is_told_with_its_flag(arguments: list[str], said: str):
    code, _, err = outerstep("plan", *arguments)
    assert (code, said in err) == (2, True), err
