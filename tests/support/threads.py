"""Calls in several threads at once."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def at_once(count: int, call: Callable[[int], Result]) -> list[Result]:
    """What `call` returns for each number below `count`. The calls begin together."""
    together = threading.Barrier(count)

    def begin(number: int) -> Result:
        together.wait()
        return call(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))
