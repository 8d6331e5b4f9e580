"""Ranges of work units: lists of [start, stop), in the order in which they are trained on. Pure."""

from collections.abc import Iterator
from itertools import chain

from outerstep.common.ranges import merged

UnitRanges = list[list[int]]


def numbers(units: UnitRanges) -> Iterator[int]:
    """The numbers of the units, one by one."""
    return chain.from_iterable(range(start, stop) for start, stop in units)


def count(units: UnitRanges) -> int:
    """The number of units."""
    return sum(stop - start for start, stop in units)


def in_order(units: UnitRanges) -> UnitRanges:
    """Return the same units in as few ranges as possible, ascending. Raises ValueError or TypeError where it is no list
    of ranges."""
    return [list(each) for each in merged(sorted(units))]


def first_units(units: UnitRanges, most: int) -> UnitRanges:
    """Return the ranges of the first `most` of `units`."""
    taken: UnitRanges = []
    for start, stop in units:
        length = min(stop - start, most)
        if length > 0:
            taken.append([start, start + length])
        most -= length
    return taken


def last_units(units: UnitRanges, most: int) -> UnitRanges:
    """Return the ranges of the last `most` of `units`."""
    skipped, left = count(units) - most, []
    for start, stop in units:
        if stop - start > max(skipped, 0):
            left.append([start + max(skipped, 0), stop])
        skipped -= stop - start
    return left


def units_left(named: UnitRanges, consumed: int) -> UnitRanges:
    """Return the units that no accepted contribution has consumed: `named`, but for the first `consumed` of them."""
    return last_units(named, count(named) - consumed)
