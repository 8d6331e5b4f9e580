"""Many cases that differ in a value are one test; whatever fails names the case that it failed in."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def case(*values: object) -> Iterator[None]:
    """Add the values to the message of what fails in the block."""
    try:
        yield
    except BaseException as error:  # also pytest's own, which is no Exception
        error.add_note(f"in the case {', '.join(map(repr, values))}")
        raise


def in_the_night(*values: object) -> Any:
    """The parameters of a test that run in the night only: before a merge, those beside them show much the same."""
    return pytest.param(*values, marks=pytest.mark.nightly)
