"""Many cases that differ in a value are one test; whatever fails names the case that it failed in."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Add the values to the message of what fails in the block."""
    try:
        yield
    except BaseException as error:  # also pytest's own, which is no Exception
        error.add_note(f"in the case {', '.join(map(repr, values))}")
        raise
