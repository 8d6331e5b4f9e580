"""An aggregator as one simulated process: the real one, in front of the simulated database and store."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coordinator.aggregation import aggregator
from coordinator.aggregation.aggregator import Aggregator
from coordinator.aggregation.states import States
from tests.simulation.coordinator_node import SECRET
from tests.simulation.world.machine import Machine
from tests.simulation.world.scheduler import Scheduler
from tests.simulation.world.store import StoreBlobs, StoreNode

AT_ONCE = 2  # tasks


class AggregatorNode(Machine):
    """`connect` opens a connection to the database."""

    def __init__(
        self,
        scheduler: Scheduler,
        rng: random.Random,
        root: Path,
        name: str,
        store: StoreNode,
        connect: Callable[[], Any],
    ) -> None:
        super().__init__(scheduler, rng, root, name)
        self._store, self._connect = store, connect

    def serve(self) -> None:
        process = Aggregator(
            self.rng.randbytes(8).hex(),
            self._connect,
            StoreBlobs(self, self._store, leads=lambda: False),
            States(self.data_dir / f"states-{self.generation}", limit_bytes=1 << 30),
            lambda _: SECRET,
            ring=lambda connection: None,
            clock=lambda: self.scheduler.now,
        )
        aggregator._run(process, None, AT_ONCE, self.stopping, check=lambda: None)  # type: ignore[arg-type]  # noqa: SLF001
        self.end()
