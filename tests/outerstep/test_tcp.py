"""The arithmetic of transfers over far and lossy lines."""

import pytest

from outerstep import plan
from outerstep.plan import INITIAL_WINDOW, PACKET_BYTES
from worker.line import line

WINDOW_BYTES = INITIAL_WINDOW * PACKET_BYTES


def test_on_a_near_line_a_transfer_takes_its_bytes_at_the_rate() -> None:
    assert plan.uplink(8e6, 0.0, 0.0).transfer_s(3e6) == 3
    assert plan.downlink(8e6, 0.001, 0.0).transfer_s(3e6) == pytest.approx(3, abs=0.001)


def test_slow_start_doubles_in_each_round_trip_until_the_line_is_full() -> None:
    """Four connections have 58 kB under way at first, 116 after a round trip, 232, 463: the line carries 250 in one."""
    way = plan.uplink(10e6, 0.2, 0.0)
    first = plan.UP_FIRST * WINDOW_BYTES
    assert way.transfer_s(first) == pytest.approx(first / 1.25e6)
    assert way.transfer_s(3 * first) == pytest.approx(0.2 + 2 * first / 1.25e6)
    assert way.transfer_s(10e6) == pytest.approx(3 * 0.2 + (10e6 - 7 * first) / 1.25e6)


def test_losses_bound_a_connection_and_many_add_up() -> None:
    one = PACKET_BYTES / 0.15 * (1.5 / 0.005) ** 0.5  # bytes per second
    way = plan.uplink(1e9, 0.15, 0.005)
    assert way.connection_bytes_per_s == pytest.approx(one)
    assert way.bytes_per_s == pytest.approx(32 * one)
    assert plan.uplink(10e6, 0.15, 0.005).bytes_per_s == 1.25e6
    assert plan.uplink(10e6, 0.15, 0.005).last_part_s(1 << 18) == pytest.approx((1 << 18) * (1 / one - 1 / 1.25e6))
    assert plan.uplink(10e6, 0.15, 0.0).last_part_s(1 << 18) == 0


def test_the_figures_are_those_of_the_worker() -> None:
    assert (line.FAR_S, line.UP_FAR, line.UP[1]) == (plan.FAR_S, plan.UP_FIRST, plan.UP_MOST)
    assert line.DOWN_FAR // line.DOWN[0] == plan.DOWN_EACH
    assert (line.UP_FAR_BYTES[1], line.DOWN_FAR_BYTES[1]) == (plan.UP_PART_BYTES, plan.DOWN_PART_BYTES)
