"""Which shards are fetched ahead, in which order, and what is kept for them."""

import threading
from collections.abc import Sequence

import pytest

from protocol.errors import Transient
from tests.support.waiting import wait_until
from worker.data.fetching.prefetching import Prefetcher
from worker.data.order import WINDOW_SHARDS, Order
from worker.errors import DataError, Stopped

SHARDS = 5 * WINDOW_SHARDS
UNITS_PER_WINDOW = 20


@pytest.fixture
def order() -> Order:
    return Order([10] * SHARDS, batch_size=4, seed=0)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.data.fetching.prefetching.THREADS", 1)


class Fetched:
    """Notes what is fetched."""

    def __init__(self, faults: dict[int, Exception] | None = None) -> None:
        self.shards: list[int] = []
        self._faults = faults or {}

    def __call__(self, shard: int) -> None:
        self.shards.append(shard)
        if shard in self._faults:
            raise self._faults[shard]


def fetch_ahead(fetched: Fetched, room: int = SHARDS) -> Prefetcher:
    """A prefetcher with room for this many shards, each of one byte."""
    return Prefetcher(fetched, [1] * SHARDS, room, threading.Event())


def windows(order: Order, *numbers: int) -> list[int]:
    return [shard for number in numbers for shard in order.shards(number * UNITS_PER_WINDOW)]


def expect(fetch: Prefetcher, order: Order, *units: Sequence[int]) -> None:
    for each in units:
        fetch(order, each)


def test_they_are_fetched_in_the_order_of_need(order: Order) -> None:
    fetched = Fetched()
    fetch = fetch_ahead(fetched)
    fetch(order, range(20, 40))  # window 1, and by the guess window 2
    wait_until(lambda: len(fetched.shards) == 2 * WINDOW_SHARDS)
    fetch.close()
    assert fetched.shards == windows(order, 1, 2)


@pytest.mark.parametrize(
    ("told", "guess"),
    [
        ([range(10)], range(10, 20)),  # nothing is known of the others: as if there were none
        ([range(10), range(40, 50)], range(80, 90)),  # there are three others
        ([range(10), [8, 9, *range(40, 50)]], range(80, 90)),  # the next round was known before this one ended
        ([range(40, 50), range(20, 30)], range(30, 40)),  # units that came back to the pool
    ],
)
def test_the_next_round_is_as_far_on_as_this_one_was(order: Order, told: list[Sequence[int]], guess: range) -> None:
    asked: list[int] = []
    noting = Order([10] * SHARDS, batch_size=4, seed=0)
    noting.shards = lambda number: asked.append(number) or order.shards(number)  # type: ignore[method-assign,func-returns-value]
    fetch = fetch_ahead(Fetched())
    expect(fetch, noting, *told)
    fetch.close()
    assert asked[-len(guess) :] == list(guess)


def test_where_there_is_no_room_it_goes_on_once_something_was_used(order: Order) -> None:
    fetched = Fetched()
    fetch = fetch_ahead(fetched, room=2 * WINDOW_SHARDS)
    fetch(order, range(60))
    wait_until(lambda: len(fetched.shards) == 2 * WINDOW_SHARDS)
    assert fetched.shards == windows(order, 0, 1)
    for shard in windows(order, 0, 1)[: WINDOW_SHARDS + 3]:
        fetch.reached(shard)
    wait_until(lambda: len(fetched.shards) == 2 * WINDOW_SHARDS + 3)
    assert fetched.shards[-3:] == windows(order, 2)[:3]
    assert set(windows(order, 1)) - set(windows(order, 1)[:3]) <= set(fetch.needed)
    fetch.close()


def test_what_was_passed_by_is_not_fetched_any_more(order: Order) -> None:
    """The training was faster."""
    fetched = Fetched()
    fetch = fetch_ahead(fetched, room=1)
    fetch(order, range(60))
    wait_until(lambda: len(fetched.shards) == 1)
    fetch.reached(windows(order, 2)[-1])
    wait_until(lambda: len(fetched.shards) == 2)
    fetch.close()
    assert fetched.shards == [windows(order, 0)[0], windows(order, 2)[0]]


def test_a_fault_is_told_and_the_others_are_fetched(order: Order, caplog: pytest.LogCaptureFixture) -> None:
    first, second = windows(order, 0)[:2]
    fetched = Fetched(faults={first: DataError("the first is not there"), second: Transient("no line")})
    fetch = fetch_ahead(fetched)
    fetch(order, range(20))
    wait_until(lambda: len(fetched.shards) == 2 * WINDOW_SHARDS)
    fetch.close()
    assert "prefetching failed: the first is not there" in caplog.text


def test_a_worker_that_stops_fetches_nothing_more(order: Order) -> None:
    fetched = Fetched(faults={windows(order, 0)[1]: Stopped("asked to stop")})
    fetch, others = fetch_ahead(fetched), set(threading.enumerate())
    fetch(order, range(20))
    wait_until(lambda: set(threading.enumerate()) <= others)
    fetch.close()
    assert fetched.shards == windows(order, 0)[:2]
