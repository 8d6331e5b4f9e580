"""The order of a set of many shards: a pure function of seed and number, in which a worker's units lie in few shards."""

import pytest

from tests.support.twister import shuffled
from worker.data.order import WINDOW_SHARDS, Order

UNEVEN = [5, 0, 17, 8, 8, 1, 30, 2, 9, 11, 4, 0, 0, 6, 21, 3, 13, 7, 2, 40]


def taken(order: Order, units: range) -> list[tuple[int, int]]:
    """(shard, row) of every sequence of these units, in order."""
    return [
        (shard, row)
        for unit in units
        for shard, row in zip(*(part.tolist() for part in order.places(unit)), strict=True)
    ]


@pytest.mark.parametrize("batch", [1, 3, 8, 29])
def test_an_epoch_has_every_sequence_but_its_last_ones_once(batch: int) -> None:
    order = Order(UNEVEN, batch, seed=3)
    everything = {(shard, row) for shard, rows in enumerate(UNEVEN) for row in range(rows)}
    assert order.units_per_epoch == len(everything) // batch
    left_out = []
    for epoch in range(3):
        units = range(epoch * order.units_per_epoch, (epoch + 1) * order.units_per_epoch)
        rows = taken(order, units)
        assert len(rows) == len(set(rows)) == len(everything) // batch * batch
        assert set(rows) <= everything
        left_out.append(everything - set(rows))
    assert all(len(each) < batch for each in left_out)


def test_units_are_the_same_whoever_asks_for_which_first() -> None:
    forwards, backwards = Order(UNEVEN, 6, seed=1), Order(UNEVEN, 6, seed=1)
    units = range(3 * forwards.units_per_epoch)
    asked = {unit: taken(backwards, range(unit, unit + 1)) for unit in reversed(units)}
    assert [row for unit in units for row in asked[unit]] == taken(forwards, units)


def test_consecutive_units_lie_in_a_window_of_shards_and_are_mixed_within_it() -> None:
    """A worker whose units are 1/10 of an epoch of 80 shards needs 8 of them, or 16 where two windows meet."""
    order = Order([1000] * 80, 10, seed=5)
    for first in range(0, order.units_per_epoch, 250):
        units = range(first, min(first + 250, order.units_per_epoch))
        shards = {shard for shard, _ in taken(order, units)}
        assert len(shards) <= 2 * WINDOW_SHARDS
        assert shards <= {shard for unit in units for shard in order.shards(unit)}
    in_one_unit = {shard for shard, _ in taken(order, range(10, 14))}
    assert len(in_one_unit) == WINDOW_SHARDS


def test_a_unit_may_begin_in_one_window_and_end_in_another() -> None:
    order = Order([10] * 24, 32, seed=0)  # windows of 80 sequences: unit 2 has 16 of the first and 16 of the second
    places = order.places(2)
    assert len(set(order.shards(2))) == 2 * WINDOW_SHARDS
    first, second = (set(order.shards(unit)) for unit in (0, 4))
    assert set(places.shards[:16].tolist()) <= first
    assert set(places.shards[16:].tolist()) <= second


def test_the_memory_is_that_of_windows_not_of_the_set() -> None:
    """A set of 10^12 tokens in 20,000 shards: the order of one unit holds 20,000 numbers and a window's."""
    order = Order([50_000] * 20_000, 512, seed=0)
    order.places(order.units_per_epoch - 1)
    assert order.units_per_epoch == 10**9 // 512
    info = order._window.cache_info()  # noqa: SLF001 - what it keeps is what is promised
    assert (info.currsize, info.maxsize) == (1, 2)


def test_the_order_is_what_docs_wire_format_says() -> None:
    """With a Mersenne twister and nothing else of numpy."""
    tokens = [40, 8, 137, 65, 70, 9, 241, 17, 73, 89, 33, 3, 1, 50, 170, 25, 105, 57, 19, 321]  # three windows
    length, batch, seed = 8, 3, 21
    order = Order([(each - 1) // length for each in tokens], batch, seed)
    total = sum((each - 1) // length for each in tokens)
    assert order.units_per_epoch == total // batch
    for epoch in range(2):
        shards = shuffled(len(tokens), seed, epoch, 0)
        places: list[tuple[int, int]] = []
        for w, start in enumerate(range(0, len(shards), 8)):
            window = shards[start : start + 8]
            sequences = [(shard, row) for shard in window for row in range((tokens[shard] - 1) // length)]
            words = (seed, epoch, w) if w else (seed, epoch)
            places += [sequences[each] for each in shuffled(len(sequences), *words)]
        for unit in range(total // batch):
            found = order.places(epoch * (total // batch) + unit)
            expected = places[unit * batch : (unit + 1) * batch]
            assert list(zip(found.shards.tolist(), found.rows.tolist(), strict=True)) == expected
