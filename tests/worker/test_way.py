"""One way of the line: parts take turns in order, on as many connections as its width is."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest

from tests.support.waiting import wait_until
from worker.line.line import Pace, Turn, Way
from worker.line.meter import LEAST_MEASURED_BYTES, WINDOW_S, Width

LEAST_PART_BYTES, MOST_PART_BYTES = 1000, 50_000


class Line:
    """A clock, and how much of what was sent is still on its way."""

    def __init__(self) -> None:
        self.now, self.underway_bytes = 0.0, 0

    def way(self, least: int = 1, most: int = 8) -> Way:
        part_bytes, pace = (LEAST_PART_BYTES, MOST_PART_BYTES), Pace(None, lambda: self.now)
        underway = lambda: self.underway_bytes  # noqa: E731
        return Way("test", Width(least, most), part_bytes, pace, clock=lambda: self.now, underway=underway)


def test_the_next_part_follows_the_last_byte_without_waiting_for_the_answer() -> None:
    way = Line().way()
    with way.turn() as first:
        first.over()
        with way.turn():  # the first one's answer is still to come
            pass


def test_as_many_at_once_as_the_width_in_the_order_in_which_they_came() -> None:
    way, running, order, go = Line().way(), [], [], threading.Semaphore(0)
    way.width.now = 2

    def part(number: int) -> Callable[[], None]:
        def act() -> None:
            with way.turn():
                order.append(number)
                running.append(number)
                go.acquire()
                running.remove(number)

        return act

    carrying = threading.Thread(target=way.carry, args=[[part(number) for number in range(6)]])
    carrying.start()
    for done in range(6):
        wait_until(partial(lambda done: len(order) == min(done + 2, 6) and len(running) == min(2, 6 - done), done))
        go.release()
    carrying.join()
    assert sorted(order) == list(range(6))


def test_a_part_that_breaks_frees_its_turn_and_is_told() -> None:
    way = Line().way()
    way.width.now = 2
    done = []

    def breaks() -> None:
        with way.turn():
            raise OSError("connection reset")

    with pytest.raises(OSError, match="reset"):
        way.carry([breaks, breaks, lambda: done.append("other")])
    assert done == ["other"]
    with way.turn(), way.turn():
        pass


def test_transfers_are_cut_into_as_many_parts_as_each_has_connections() -> None:
    way, size = Line().way(4, 64), 16 * LEAST_PART_BYTES
    assert way.cut(size) == [(0, size)]
    way.width.now = 16
    assert [stop - start for start, stop in way.cut(size)] == 4 * [size // 4]
    assert way.cut(LEAST_PART_BYTES + 1) == [(0, LEAST_PART_BYTES), (LEAST_PART_BYTES, LEAST_PART_BYTES + 1)]
    assert max(stop - start for start, stop in way.cut(8 << 20)) == MOST_PART_BYTES


def test_no_part_is_over_in_less_than_a_fifth_of_a_second_of_the_line() -> None:
    way = Line().way(1, 64)
    way.width.now = 32
    way.rate.add(10_000_000, 1.0)
    assert {stop - start for start, stop in way.cut(20_000_000)} == {2_000_000}


def test_the_rate_is_that_of_what_is_too_much_for_buffers_and_has_arrived() -> None:
    line = Line()
    way = line.way()

    def send(size: int, left: int = 0) -> None:
        with way.turn() as turn:
            turn.moved(1)
            line.now += size / 1e6
            line.underway_bytes = left
            turn.moved(size - 1)
            turn.over()
            line.now += 100  # until the answer

    send(LEAST_MEASURED_BYTES - 1)
    assert way.rate.sums == (0, 0)
    send(3_000_000)
    assert way.rate.sums == pytest.approx((3_000_000, 3.0))
    send(3_000_000, left=500_000)
    assert way.rate.sums[0] / way.rate.sums[1] == pytest.approx(1e6 * (1.5 + 2.5) / (1.5 + 3))


def test_a_line_that_rewards_more_connections_gets_them() -> None:
    """Each carries 100 kB/s, and all together 350."""
    line = Line()
    way = line.way()
    step_s = WINDOW_S / 10
    with ExitStack() as stack:
        turns: list[Turn] = []
        widths = set()
        for _ in range(200):
            while len(turns) < way.width.now:
                turns.append(stack.enter_context(way.turn()))
            for turn in turns[way.width.now :]:
                turn.over()
            del turns[way.width.now :]
            widths.add(len(turns))
            line.now += step_s
            for turn in turns:
                turn.moved(int(min(100e3, 350e3 / len(turns)) * step_s))
    assert widths == {1, 2, 4, 8}
    assert way.width.now == 4
