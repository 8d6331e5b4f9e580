"""How many connections a direction uses: as many as pay off, on every kind of line."""

from collections.abc import Callable

import pytest

from worker.line.meter import TRIED_AGAIN, ParallelConnections

Line = Callable[[int], float]  # connections -> bytes per second


def bound(each: float, all_: float) -> Line:
    """Bytes per second over this many connections: bounded for one connection, and for all."""
    return lambda count: min(count * each, all_)


def after(parallel: ParallelConnections, line: Line, measurements: int) -> int:
    for _ in range(measurements):
        parallel.measured(line(parallel.now))
    return parallel.now


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (bound(100, 100), 1),  # short and clean
        (bound(60, 100), 2),
        (bound(10, 100), 16),
        (bound(1, 100), 32),  # even if more would pay off
    ],
)
def test_as_many_as_bring_more(line: Line, expected: int) -> None:
    assert after(ParallelConnections(1, 32), line, 10) == expected


def test_on_a_far_line_more_from_the_beginning() -> None:
    parallel = ParallelConnections(1, 32)
    parallel.restart_at(4)
    assert parallel.now == 4
    assert after(parallel, bound(50, 100), 3) == 4
    assert after(parallel, bound(100, 100), 5 * TRIED_AGAIN) == 4


def test_a_line_that_begins_to_lose_packets_is_tried_anew() -> None:
    parallel = ParallelConnections(1, 32)
    assert after(parallel, bound(100, 100), 10) == 1
    assert after(parallel, bound(10, 100), 10) == 16


def test_a_line_that_is_halved_needs_no_more() -> None:
    parallel = ParallelConnections(1, 32)
    assert after(parallel, bound(60, 100), 10) == 2
    assert after(parallel, bound(50, 50), 10) == 2


def test_fewer_are_tried_now_and_then() -> None:
    parallel = ParallelConnections(1, 32)
    assert after(parallel, bound(10, 100), 10) == 16
    assert after(parallel, bound(100, 100), 5 * TRIED_AGAIN) == 1


def test_what_is_still_needed_is_kept() -> None:
    parallel = ParallelConnections(1, 32)
    assert after(parallel, bound(10, 100), 10) == 16
    assert after(parallel, bound(10, 100), 2 * TRIED_AGAIN) == 16


def test_no_more_where_a_queue_stands_before_the_line() -> None:
    """After a silence, the rate of a connection rises on its own."""
    parallel = ParallelConnections(1, 32)
    for rate in (10, 20, 40, 80):
        parallel.measured(rate, full=True)
    assert parallel.now == 1


@pytest.mark.parametrize(("least", "most"), [(4, 64), (1, 1), (4, 4)])
def test_never_fewer_than_the_least_and_never_more_than_the_most(least: int, most: int) -> None:
    parallel, seen = ParallelConnections(least, most), set()
    for line in (bound(1, 1e9), bound(100, 100), bound(1, 1e9)):
        for _ in range(3 * TRIED_AGAIN):
            parallel.measured(line(parallel.now))
            seen.add(parallel.now)
    assert min(seen) >= least
    assert max(seen) == most
