"""A real aggregator in threads of this process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

from sqlalchemy import URL

from coordinator.aggregation import queue
from coordinator.aggregation.aggregator import RENEW_S, Aggregator
from coordinator.aggregation.states import States
from coordinator.store import postgresql
from coordinator.store.blobs import Blobs
from coordinator.store.database import Database
from coordinator.store.postgresql import deployment

STATE_BYTES = 1 << 30


@contextmanager
def opened(
    name: str, url: URL, blobs: Blobs, folder: Path, clock: Callable[[], float] = time.monotonic
) -> Iterator[Aggregator]:
    """An aggregator that does nothing by itself."""
    Database(url).close()
    engine = postgresql.engine_of(url, connections=3)
    try:
        ring = partial(postgresql.ring, channel=queue.RESULTS)
        states = States(folder, STATE_BYTES)
        yield Aggregator(name, engine.connect, blobs, states, lambda each: deployment(each).secret, ring, clock)
    finally:
        engine.dispose()


@contextmanager
def aggregator_thread(name: str, url: URL, blobs: Blobs, folder: Path) -> Iterator[Aggregator]:
    """An aggregator that does tasks until the end of the block."""
    stopping = threading.Event()
    with ExitStack() as stack:
        aggregator = stack.enter_context(opened(name, url, blobs, folder))
        aggregator.renew()

        def renew() -> None:
            while not stopping.wait(RENEW_S):
                aggregator.renew()

        threads = [threading.Thread(target=each) for each in (aggregator.work, aggregator.work, renew)]
        stack.enter_context(closing(postgresql.Bell(url, queue.TASKS, aggregator.wake)))
        for thread in threads:
            thread.start()
        try:
            yield aggregator
        finally:
            stopping.set()
            aggregator.stop()
            for thread in threads:
                thread.join()
