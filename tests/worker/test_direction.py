"""One direction of the line: parts get slots in order, over its parallel connections."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest

from tests.support.waiting import wait_until
from worker.line.line import Direction, RateLimit, Slot
from worker.line.meter import LEAST_MEASURED_BYTES, WINDOW_S, ParallelConnections

LEAST_PART_BYTES, MOST_PART_BYTES = 1000, 50_000


class Line:
    """A clock, and how much of what was sent is still in flight."""

    def __init__(self) -> None:
        self.now, self.unacknowledged_bytes = 0.0, 0

    def direction(self, least: int = 1, most: int = 8) -> Direction:
        part_bytes, limit = (LEAST_PART_BYTES, MOST_PART_BYTES), RateLimit(None, lambda: self.now)
        unacknowledged = lambda: self.unacknowledged_bytes  # noqa: E731
        return Direction(
            "test",
            ParallelConnections(least, most),
            part_bytes,
            limit,
            clock=lambda: self.now,
            unacknowledged=unacknowledged,
        )


def test_the_next_part_follows_the_last_byte_without_waiting_for_the_answer() -> None:
    direction = Line().direction()
    with direction.slot() as first:
        first.release()
        with direction.slot():  # the first one's answer is still to come
            pass


def test_parts_run_in_order_as_many_at_once_as_there_are_connections() -> None:
    direction, running, order, go = Line().direction(), [], [], threading.Semaphore(0)
    direction.parallel.now = 2

    def part(number: int) -> Callable[[], None]:
        def act() -> None:
            with direction.slot():
                order.append(number)
                running.append(number)
                go.acquire()
                running.remove(number)

        return act

    carrying = threading.Thread(target=direction.run_all, args=[[part(number) for number in range(6)]])
    carrying.start()
    for done in range(6):
        wait_until(partial(lambda done: len(order) == min(done + 2, 6) and len(running) == min(2, 6 - done), done))
        go.release()
    carrying.join()
    assert sorted(order) == list(range(6))


def test_a_part_that_fails_releases_its_slot_and_raises() -> None:
    direction = Line().direction()
    direction.parallel.now = 2
    done = []

    def breaks() -> None:
        with direction.slot():
            raise OSError("connection reset")

    with pytest.raises(OSError, match="reset"):
        direction.run_all([breaks, breaks, lambda: done.append("other")])
    assert done == ["other"]
    with direction.slot(), direction.slot():
        pass


def test_transfers_are_cut_into_as_many_parts_as_each_has_connections() -> None:
    direction, size = Line().direction(4, 64), 16 * LEAST_PART_BYTES
    assert direction.split(size) == [(0, size)]
    direction.parallel.now = 16
    assert [stop - start for start, stop in direction.split(size)] == 4 * [size // 4]
    assert direction.split(LEAST_PART_BYTES + 1) == [(0, LEAST_PART_BYTES), (LEAST_PART_BYTES, LEAST_PART_BYTES + 1)]
    assert max(stop - start for start, stop in direction.split(8 << 20)) == MOST_PART_BYTES


def test_no_part_is_over_in_less_than_a_fifth_of_a_second_of_the_line() -> None:
    direction = Line().direction(1, 64)
    direction.parallel.now = 32
    direction.rate.add(10_000_000, 1.0)
    assert {stop - start for start, stop in direction.split(20_000_000)} == {2_000_000}


def test_the_rate_is_that_of_what_is_too_much_for_buffers_and_has_arrived() -> None:
    line = Line()
    direction = line.direction()

    def send(size: int, left: int = 0) -> None:
        with direction.slot() as slot:
            slot.moved(1)
            line.now += size / 1e6
            line.unacknowledged_bytes = left
            slot.moved(size - 1)
            slot.release()
            line.now += 100  # until the answer

    send(LEAST_MEASURED_BYTES - 1)
    assert direction.rate.sums == (0, 0)
    send(3_000_000)
    assert direction.rate.sums == pytest.approx((3_000_000, 3.0))
    send(3_000_000, left=500_000)
    assert direction.rate.sums[0] / direction.rate.sums[1] == pytest.approx(1e6 * (1.5 + 2.5) / (1.5 + 3))


def test_connections_are_added_while_they_pay_off() -> None:
    """Each carries 100 kB/s, and all together 350."""
    line = Line()
    direction = line.direction()
    step_s = WINDOW_S / 10
    with ExitStack() as stack:
        turns: list[Slot] = []
        widths = set()
        for _ in range(200):
            while len(turns) < direction.parallel.now:
                turns.append(stack.enter_context(direction.slot()))
            for slot in turns[direction.parallel.now :]:
                slot.release()
            del turns[direction.parallel.now :]
            widths.add(len(turns))
            line.now += step_s
            for slot in turns:
                slot.moved(int(min(100e3, 350e3 / len(turns)) * step_s))
    assert widths == {1, 2, 4, 8}
    assert direction.parallel.now == 4
