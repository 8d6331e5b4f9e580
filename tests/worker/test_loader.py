"""Batches are made ahead of need, as many as there is room for, and the loop sees nothing of it. Shards are fetched ahead, in
the order of need."""

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from protocol.errors import Transient
from tests.support.waiting import PATIENCE_S, wait_until
from tests.worker.test_side_stream import DEVICES, Recorder
from worker.data.fetching.prefetching import Prefetcher
from worker.data.loader import AHEAD, Copier, batches
from worker.data.order import WINDOW_SHARDS, Order
from worker.errors import DataError, Stopped

CPU = torch.device("cpu")


class Course:
    """The units that a loop is given, one after the other; what is known to come can be changed on the way."""

    def __init__(self, units: list[int]) -> None:
        self.given: list[int] = []
        self.coming = units

    def units(self) -> Iterator[int]:
        while self.coming:
            unit, *self.coming = self.coming
            self.given.append(unit)
            yield unit

    def upcoming(self) -> Iterator[int]:
        return iter(self.coming)


class Maker:
    """Makes batches and notes which, and what it was told to expect."""

    def __init__(self, broken: int | None = None) -> None:
        self.made: list[int] = []
        self.expected: list[list[int]] = []
        self._broken = broken

    def expect(self, units: Sequence[int]) -> None:
        self.expected.append(list(units))

    def unit(self, number: int) -> Tensor:
        self.made.append(number)
        if number == self._broken:
            raise DataError(f"unit {number} is broken")
        return torch.full((2, 3), number)


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_the_next_batches_are_made_while_the_loop_has_one_and_no_more() -> None:
    make, course = Maker(), Course(list(range(20)))
    seen = []
    for _, batch in batches(course, make, CPU):
        wait_until(lambda: make.made[-1] == min(course.given[-1] + AHEAD, 19))
        assert make.made == list(range(make.made[-1] + 1))
        seen.append(batch[0, 0].item())
    assert seen == list(range(20))


def test_a_fault_is_raised_at_its_unit_and_those_before_are_trained_on() -> None:
    make, course = Maker(broken=5), Course(list(range(20)))
    loop = batches(course, make, CPU)
    for unit in range(5):
        assert next(loop)[1][0, 0].item() == unit
        wait_until(lambda: make.made[-1] == course.given[-1] + AHEAD)
    assert 5 in make.made
    with pytest.raises(DataError, match="unit 5 is broken"):
        next(loop)
    assert course.given[-1] == 5


def test_a_broken_batch_that_is_not_wanted_any_more_hurts_nobody() -> None:
    """The round was dropped, and the next one is of other units."""
    make, course = Maker(broken=2), Course([0, 1, 2, 3])
    seen = []
    for _, batch in batches(course, make, CPU):
        seen.append(batch[0, 0].item())
        if seen == [0]:
            wait_until(lambda: 2 in make.made)
            course.coming = [7, 8, 1]
    assert seen == [0, 7, 8, 1]


def test_what_the_look_ahead_did_not_name_is_made_when_it_is_needed() -> None:
    course = Course([4, 9, 2])
    course.upcoming = lambda: iter(())  # type: ignore[method-assign]
    assert [(unit, batch[0, 0].item()) for unit, batch in batches(course, Maker(), CPU)] == [(4, 4), (9, 9), (2, 2)]


@pytest.mark.parametrize(("known_at", "left"), [(9, []), (6, [7, 8, 9])])
def test_all_that_is_known_to_come_is_told_once(known_at: int, left: list[int]) -> None:
    """A next round that is known before this one ends is told with what is left of this one."""
    make, course, coming = Maker(), Course(list(range(10))), [*left, 30, 31, 32, 33, 34]
    for unit, _ in batches(course, make, CPU):
        if unit == known_at and len(make.expected) == 1:
            course.coming = coming
    assert make.expected == [list(range(10)), coming]


def test_a_worker_that_is_asked_to_stop_while_it_waits_for_a_batch_ends_its_loop() -> None:
    """Without a fault, so that what it has trained is handed in."""
    make, course = Maker(), Course([0, 1, 2])
    make_unit = make.unit

    def unit(number: int) -> Tensor:
        if number == 1:
            raise Stopped("asked to stop while a shard was fetched")
        return make_unit(number)

    make.unit = unit  # type: ignore[method-assign]
    assert [number for number, _ in batches(course, make, CPU)] == [0]


@pytest.mark.parametrize("end", ["the end", "break", "an exception"])
def test_the_thread_ends_with_the_loop(end: str) -> None:
    course, make = Course(list(range(100))), Maker()
    loop = batches(course, make, CPU)
    try:
        for _ in loop:
            assert loader_threads()
            if end == "break":
                break
            if end == "an exception":
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    del loop
    wait_until(lambda: not loader_threads())
    assert len(make.made) <= len(course.given) + AHEAD


def test_a_loop_that_ends_does_not_wait_for_a_batch_that_is_not_to_be_had() -> None:
    """A shard that never comes, of a unit that nobody needs any more."""
    given_up, make = threading.Event(), Maker()

    def unit(number: int) -> Tensor:
        if number:
            assert given_up.wait(PATIENCE_S)
        return torch.zeros(1)

    make.unit = unit  # type: ignore[method-assign]
    for _ in batches(Course([0, 1]), make, CPU):
        break
    given_up.set()  # only now: the loop is over already
    wait_until(lambda: not loader_threads())


class PinnedOnly:
    """What is asked of a batch on its way to CUDA, noted."""

    def __init__(self, streams: Recorder) -> None:
        self._streams = streams

    def pin_memory(self) -> "PinnedOnly":
        self._streams.calls.append(("pinned",))
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> "PinnedOnly":
        assert non_blocking
        self._streams.kernel()
        return self

    def record_stream(self, stream: str) -> None:
        self._streams.calls.append(("kept for", stream))


def test_to_cuda_it_is_copied_beside_the_training_and_kept_until_the_training_has_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = Recorder()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams.in_torch)
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(current_stream=streams.in_torch.current_stream))
    copier, batch = Copier(torch.device("cuda:1")), PinnedOnly(streams)
    ready: Any = copier.ahead(batch)  # type: ignore[arg-type]
    copier.here(ready)
    assert streams.calls == [
        ("pinned",),
        ("kernel", "side of cuda:1"),
        ("record", "side of cuda:1"),
        ("synchronize",),
        ("kept for", "training"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_every_batch_arrives_whole_however_far_the_device_is_behind(device: str) -> None:
    """On a GPU the host runs ahead: batches are freed here while kernels that read them are still to come."""
    course = Course(list(range(50)))
    busy = torch.ones(512, 512, device=device) / 512
    sums = []
    make = Maker()
    make.unit = lambda number: torch.full((1 << 16,), number)  # type: ignore[method-assign]
    for _, batch in batches(course, make, torch.device(device)):
        for _ in range(10):
            busy = busy @ busy
        sums.append(batch.sum() + busy[0, 0].long() * 0)
    assert [int(each) >> 16 for each in sums] == list(range(50))


# --- shards --------------------------------------------------------------------------------------------------------


SHARDS = 5 * WINDOW_SHARDS
UNITS_PER_WINDOW = 20


@pytest.fixture
def order() -> Order:
    return Order([10] * SHARDS, batch_size=4, seed=0)


@pytest.fixture(autouse=True)
def one_fetcher(monkeypatch: pytest.MonkeyPatch) -> None:
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
