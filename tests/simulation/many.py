"""Many seeds, on all CPUs, and the sum of what happened in them."""

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from tests.simulation.simulation import Report, scratch, simulate

REPLAY = "python -m tests.simulation {seed}"
_SEEDS_PER_PROCESS = 500


def many(seeds: Iterable[int], jobs: int | None = None) -> Iterator[Report]:
    """Simulate each seed, in new processes; the reports as they come."""
    context = multiprocessing.get_context("spawn")
    processes = jobs or len(os.sched_getaffinity(0))
    with scratch() as base, context.Pool(processes, maxtasksperchild=_SEEDS_PER_PROCESS) as pool:
        yield from pool.imap_unordered(partial(simulate, base=base), seeds)


@dataclass
class Summary:
    """What happened in many seeds."""

    seeds: int = 0
    failed: int = 0
    rounds: int = 0
    steps: int = 0
    checks: int = 0
    virtual_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)

    def add(self, report: Report) -> None:
        self.seeds += 1
        self.failed += report.failure is not None
        self.rounds += report.rounds
        self.steps += report.steps
        self.checks += report.checks
        self.virtual_s += report.virtual_s
        self.faults.update(report.faults)

    def line(self) -> str:
        rate = self.seeds / max(time.monotonic() - self.began, 1e-9)
        return f"{self.seeds} seeds, {self.failed} failed, {rate:.1f} seeds/s"

    def text(self) -> str:
        faults = "\n".join(f"  {count:8} {what}" for what, count in sorted(self.faults.items()))
        return (
            f"{self.line()}\n{self.rounds} rounds, {self.steps} steps, {self.checks} checks of the database, "
            f"{self.virtual_s / 3600:.1f} virtual hours\n{faults}"
        )
