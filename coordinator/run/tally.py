"""What has happened in a run since this process has it, counted: nothing depends on it, and a restart begins at 0."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """What came of a contribution to a fragment."""

    COUNTED = "counted"  # with all of its weight
    SHORTENED = "shortened"
    LEFT_OUT = "left_out"
    LATE = "late"


@dataclass
class Tally:
    """events    by kind
    outcomes  of contributions"""

    events: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def judged(self, factors: Iterable[float]) -> None:
        """Count the contributions to a published fragment. `factors`: how much of its weight each of them counts."""
        self.outcomes.update(map(_outcome, factors))

    def late(self) -> None:
        """Count a contribution that was refused because its fragment had closed."""
        self.outcomes[Outcome.LATE] += 1


def _outcome(factor: float) -> Outcome:
    if factor == 0:
        return Outcome.LEFT_OUT
    return Outcome.COUNTED if factor >= 1 else Outcome.SHORTENED
