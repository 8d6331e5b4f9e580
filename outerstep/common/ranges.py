"""Half-open ranges [start, stop) of work units or bytes. Pure."""

from collections.abc import Iterable, Sequence

Range = tuple[int, int]


def merged(ranges: Iterable[Sequence[int]]) -> list[Range]:
    """Return the same numbers in the same order, with each range that begins where the one before ends merged into it.

    Raises ValueError or TypeError if `ranges` are not pairs.
    """
    result: list[Range] = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result


def overlap(ranges: Iterable[Range], start: int, stop: int) -> list[Range]:
    """Return what `ranges` have in common with [start, stop)."""
    return [(max(a, start), min(b, stop)) for a, b in ranges if max(a, start) < min(b, stop)]


def without(ranges: Iterable[Range], start: int, stop: int) -> list[Range]:
    """Return `ranges` without [start, stop)."""
    pieces = [piece for a, b in ranges for piece in ((a, min(b, start)), (max(a, stop), b))]
    return [(a, b) for a, b in pieces if a < b]
