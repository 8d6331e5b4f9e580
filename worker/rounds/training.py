"""Seeds that a worker and a round have for themselves.

Where in its assignment a worker is: the inner steps that it has done, the units that it has used, and its place in
the learning rate's schedule.

A unit is used once its inner step is done, or once the loop asks for the next unit: so one whose step a GradScaler
skipped is used as well, wherever in the round it lies. A used unit is spent, and counts in the weight of the
contribution; all others go back to the pool.

The training loop's side of the rounds: the model, its inner optimizers, and how far they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from blake3 import blake3

from protocol.messages import Assignment, EvaluationReport
from protocol.spec.run import RunSpec
from worker.accounts.progress import Progress
from worker.privacy.mechanism import Protection
from worker.ranks import ALONE, Ranks
from worker.state.fragments import Fragments
from worker.state.optimizer_state import OwnPoints
from worker.state.work import UnitRanges, first_units, units_left
from worker.state.writes import Writes


def round_seed(seed: int, worker: str, round_number: int, rank: int = 0) -> int:
    """Return the seed of the random numbers (dropout, for example) of one worker, or one of its processes, in one
    round, below 2^63."""
    name = f"{seed}\0{worker}\0{round_number}" + (f"\0{rank}" if rank else "")
    return int.from_bytes(blake3(name.encode()).digest()[:8], "little") >> 1


class InnerSteps:
    """Counts one worker's inner steps, round by round."""

    def __init__(self, spec: RunSpec) -> None:
        self._warmup_steps = spec.inner.joiner_warmup_steps
        self.done = 0
        self.taken = 0  # by this process, in all rounds
        self.unit_stepped = False  # the unit in hand; always False where the loop takes no units
        self._step = self._scheduled = self._own = self._units_begun = self._units_used = 0
        self._units: UnitRanges = []
        self.warmup_left: int | None = None  # until a joiner's inner optimizer is warm; None: not one step yet

    def begin(self, assignment: Assignment) -> None:
        """Nothing of `assignment`, which is of action `train`, is done yet."""
        self.done = self._units_begun = self._units_used = 0
        self._step, self._scheduled = assignment.step, assignment.schedule_steps
        self._own, self._units = assignment.inner_steps, assignment.units
        if self.warmup_left is None:
            self.warmup_left = self._warmup_steps if assignment.round else 0

    def begin_unit(self) -> None:
        """Note that the loop was given the next unit. A loop that takes no units here uses one per inner step."""
        self._units_begun += 1
        self.unit_stepped = False

    def end_unit(self) -> None:
        """Note that the loop is through with the unit, whether or not its step was skipped."""
        self._units_used = max(self._units_used, self._units_begun)

    def step(self) -> None:
        """Note that one inner step is done."""
        self.done += 1
        self.taken += 1
        self.unit_stepped = self._units_begun > 0
        self._units_used = max(self._units_begun, self.done)
        if self.warmup_left:
            self.warmup_left -= 1

    @property
    def units_used(self) -> UnitRanges:
        """The units that were used: the first ones of the assignment."""
        return first_units(self._units, self._units_used)

    @property
    def units_to_come(self) -> UnitRanges:
        """The units of the assignment that are neither used nor in hand: one for each inner step that is left."""
        due = first_units(self._units, self._own)
        return units_left(due, max(self._units_begun, self._units_used))

    @property
    def global_step(self) -> int:
        """The schedule's step before the round, and of its steps the share that is done."""
        return self._step + (self.done * self._scheduled // self._own if self._own else self.done)

    @property
    def warmup_scale(self) -> float:
        """1, or less during the first `inner.joiner_warmup_steps` steps of a worker that joined after round 0."""
        if not self.warmup_left:
            return 1.0
        return (self._warmup_steps - self.warmup_left + 1) / (self._warmup_steps + 1)


@dataclass(frozen=True)
class Training:
    """What one worker trains. `evaluate` measures the held-out loss of the model as it is; None where none is.
    `initial` puts state 0 into the model; None where it holds that. `scaler` scales the loss, for fp16; None where
    nothing does. `writes`: watches that the optimizers alone write to the parameters. `ranks`: the processes that
    train it together. `points`: what the optimizers keep beside it. `protection`: what is done to contributions before
    they leave; None where the run has no [privacy]."""

    fragments: Fragments
    optimizers: Sequence[torch.optim.Optimizer]
    steps: InnerSteps
    progress: Progress
    evaluate: Callable[[], EvaluationReport] | None
    initial: Callable[[], None] | None
    scaler: torch.amp.GradScaler | None
    writes: Writes
    ranks: Ranks = ALONE
    points: OwnPoints = field(default_factory=OwnPoints)
    protection: Protection | None = None

    def scaler_state(self) -> dict[str, Any] | None:
        """Return the scale of the loss and when it grows; None without a scaler."""
        return None if self.scaler is None else self.scaler.state_dict()
