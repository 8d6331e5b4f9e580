"""One direction of the line: parts get slots in order, over as many parallel connections as pay off on every kind of line,
and keep to a rate limit."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import httpx
import pytest
from blake3 import blake3

from protocol import wire
from tests.support.states import zeros_of_state_0
from tests.support.waiting import wait_until
from worker.line.line import AHEAD_S, Direction, RateLimit, Slot
from worker.line.meter import LEAST_MEASURED_BYTES, TRIED_AGAIN, WINDOW_S, ParallelConnections
from worker.link.client import Client
from worker.settings import WorkerSettings

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


# --- how many connections ------------------------------------------------------------------------------------------


Rates = Callable[[int], float]  # connections -> bytes per second


def bound(each: float, all_: float) -> Rates:
    """Bytes per second over this many connections: bounded for one connection, and for all."""
    return lambda count: min(count * each, all_)


def after(parallel: ParallelConnections, line: Rates, measurements: int) -> int:
    for _ in range(measurements):
        parallel.measured(line(parallel.now))
    return parallel.now


CLEAN, LOSSY = bound(100, 100), bound(10, 100)
LINES: dict[str, list[tuple[Rates, int, int]]] = {  # each for so many measurements, and the connections then
    "short and clean": [(CLEAN, 10, 1)],
    "two pay off": [(bound(60, 100), 10, 2)],
    "more would pay off": [(bound(1, 100), 10, 32)],
    "begins to lose packets": [(CLEAN, 10, 1), (LOSSY, 10, 16)],
    "is halved": [(bound(60, 100), 10, 2), (bound(50, 50), 10, 2)],
    "fewer are tried now and then": [(LOSSY, 10, 16), (CLEAN, 5 * TRIED_AGAIN, 1)],
    "what is still needed is kept": [(LOSSY, 10, 16), (LOSSY, 2 * TRIED_AGAIN, 16)],
}


@pytest.mark.parametrize("lines", LINES.values(), ids=LINES.keys())
def test_as_many_as_bring_more(lines: list[tuple[Rates, int, int]]) -> None:
    parallel = ParallelConnections(1, 32)
    for line, measurements, expected in lines:
        assert after(parallel, line, measurements) == expected


def test_on_a_far_line_more_from_the_beginning() -> None:
    parallel = ParallelConnections(1, 32)
    parallel.restart_at(4)
    assert parallel.now == 4
    assert after(parallel, bound(50, 100), 3) == 4
    assert after(parallel, bound(100, 100), 5 * TRIED_AGAIN) == 4


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


# --- rate limits ---------------------------------------------------------------------------------------------------


HEADER, FRAMES = zeros_of_state_0(1 << 20)
BLOB = b"".join([wire.pack_header(HEADER), *FRAMES])  # 4 MiB
LIMIT_BYTES = len(BLOB) + wire.MAX_HEADER_BYTES
PIECE_BYTES = 1 << 15


class Time:
    """Advances whenever something waits for the stop signal, which it also is, and which is never set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float) -> bool:
        self.now += timeout
        return False


class Pieces(httpx.SyncByteStream):
    def __iter__(self) -> Iterator[bytes]:
        for at in range(0, len(BLOB), PIECE_BYTES):
            yield BLOB[at : at + PIECE_BYTES]


def client_at(time: Time, max_up: float | None = None, max_down: float | None = None) -> Client:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.method == "PUT":
            request.read()
            return httpx.Response(201, json={})
        headers = {"ETag": f'"{blake3(BLOB).hexdigest()}"', "Content-Length": str(len(BLOB))}
        return httpx.Response(200, headers=headers, stream=Pieces())

    http = httpx.Client(transport=httpx.MockTransport(handle), base_url="http://c")
    return Client(http, "r", "t", clock=time, max_up=max_up, max_down=max_down).until(time)


def test_transfers_take_as_long_as_the_rate_says() -> None:
    up, down = Time(), Time()
    client_at(up, max_up=8e6).seed("m", HEADER, FRAMES)
    client_at(down, max_down=16e6).delta(0, 0, LIMIT_BYTES)
    assert up.now == pytest.approx(len(BLOB) / 1e6, abs=AHEAD_S + PIECE_BYTES / 1e6)
    assert down.now == pytest.approx(len(BLOB) / 2e6, abs=AHEAD_S + PIECE_BYTES / 2e6)


def test_without_a_rate_nobody_waits() -> None:
    time = Time()
    client = client_at(time)
    client.seed("m", HEADER, FRAMES)
    client.delta(0, 0, LIMIT_BYTES)
    assert time.now == 0


def test_what_was_not_used_is_not_made_up_for() -> None:
    time = Time()
    pace = RateLimit(8e6, time)
    assert pace.delay_s(1_000_000) == 0
    assert pace.delay_s(1_000_000) == pytest.approx(1.0)
    time.now = 100.0
    assert pace.delay_s(1_000_000) == 0
    assert pace.delay_s(1_000_000) == pytest.approx(1.0 - AHEAD_S)


@pytest.mark.parametrize(("given", "rate"), [("8mbit", 8e6), ("2.5Gbit/s", 2.5e9), (9600.0, 9600.0)])
def test_rates_as_they_are_given(given: str | float, rate: float) -> None:
    assert WorkerSettings.model_validate({"url": "http://c", "run": "r", "token": "t", "max_up": given}).max_up == rate


@pytest.mark.parametrize("given", ["8", "fast", "0mbit", "-1mbit", 0.0, float("inf")])
def test_rates_that_are_none(given: str | float) -> None:
    with pytest.raises(ValueError, match="max_down"):
        WorkerSettings.model_validate({"url": "http://c", "run": "r", "token": "t", "max_down": given})
