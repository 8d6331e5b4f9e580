"""The training loop's side of the rounds: the model and its optimizers, the count of inner steps, the round's seed.

A unit is used once its inner step is done, or once the loop asks for the next unit: so a unit whose step a GradScaler
skipped is used as well, wherever in the round it is. Used units are spent, and count in the weight of the contribution;
all others go back to the pool.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from blake3 import blake3

from protocol.messages import Assignment, EvaluationReport
from protocol.spec.run import RunSpec
from worker.accounts.progress import Progress
from worker.ranks import ALONE, Ranks
from worker.state.fragments import Fragments
from worker.state.optimizer_state import ScheduleFreePoints
from worker.state.work import UnitRanges, count, first_units, units_left
from worker.state.writes import ForeignWrites


def round_seed(seed: int, worker: str, round_number: int, rank: int = 0) -> int:
    """Return the seed for the random numbers (dropout, for example) of one worker, or of one of its processes, in one
    round; below 2^63."""
    name = f"{seed}\0{worker}\0{round_number}" + (f"\0{rank}" if rank else "")
    return int.from_bytes(blake3(name.encode()).digest()[:8], "little") >> 1


class InnerSteps:
    """Counts one worker's inner steps, round by round."""

    def __init__(self, spec: RunSpec) -> None:
        self.warmup_steps = spec.inner.joiner_warmup_steps
        self._trains_on = spec.sync.wait == "never"
        self.done = 0
        self.taken = 0  # by this process, in all rounds
        self.unit_stepped = False  # the current unit; always False if the loop takes no units
        self.own = 0  # inner steps of the round until its contribution has H of them; at least one
        self.ready = False  # the contribution has them as the round begins
        self.most = 0  # inner steps of the round; more than its own ones if they go on until its deltas are there
        self._step = self._scheduled = self._units_begun = self._units_used = 0
        self._units: UnitRanges = []
        self.warmup_left: int | None = None  # steps until a joiner's inner optimizer is warm; None: not one step yet

    def begin(self, assignment: Assignment, ahead: int = 0) -> None:
        """Start counting for `assignment`, whose action is `train`. `ahead`: the steps since the last contribution; if
        the training goes on while deltas are awaited, they are the first of this round's H."""
        self.done = self._units_begun = self._units_used = 0
        self._step, self._scheduled = assignment.step, assignment.schedule_steps
        left = assignment.inner_steps - (ahead if self._trains_on else 0)
        self.own, self._units = max(left, min(assignment.inner_steps, 1)), assignment.units
        self.ready = assignment.inner_steps > 0 and left <= 0
        # Fewer than H units if an earlier process of this worker has contributed to the round as it left.
        self.most = count(self._units) if self._trains_on else self.own
        if self.warmup_left is None:
            self.warmup_left = self.warmup_steps if assignment.round else 0

    def begin_unit(self) -> None:
        """Note that the loop was given the next unit. A loop that takes no units uses one per inner step."""
        self._units_begun += 1
        self.unit_stepped = False

    def end_unit(self) -> None:
        """Note that the loop is done with the unit, whether or not its step was skipped."""
        self._units_used = max(self._units_used, self._units_begun)

    def step(self) -> None:
        """Note one inner step."""
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
    def may_go_on(self) -> bool:
        """True if units are left for inner steps beyond the round's own."""
        return self._units_used < self.most

    @property
    def units_to_come(self) -> UnitRanges:
        """The units of the assignment that are neither used nor current: one for each remaining inner step. Beyond the
        round's own steps it is one at a time, as each may be the last."""
        past = max(self._units_begun, self._units_used)
        due = first_units(self._units, min(max(self.own, past + 1), self.most))
        return units_left(due, past)

    @property
    def global_step(self) -> int:
        """The run's schedule step: that of the round's start, plus the part of the round's steps that is done."""
        done = min(self.done, self.own) if self._trains_on else self.done
        return self._step + (done * self._scheduled // self.own if self.own else done)

    @property
    def warmup_scale(self) -> float:
        """Factor for the learning rate: 1, or less in the first `inner.joiner_warmup_steps` of a worker that joined
        after round 0."""
        if not self.warmup_left:
            return 1.0
        return (self.warmup_steps - self.warmup_left + 1) / (self.warmup_steps + 1)


@dataclass(frozen=True)
class Training:
    """What one worker trains.

    evaluate   measures the held-out loss of the model as it is; None: this worker measures none
    probe      the same on fewer tokens, to compare states that differ a little
    initial    loads state 0 into the model; None: the model holds it
    scaler     scales the loss for fp16; None: nothing does
    writes     detects writes to the parameters by anything but the optimizers
    ranks      the processes that train it together
    points     the points that schedule-free optimizers keep beside the parameters
    """

    fragments: Fragments
    optimizers: Sequence[torch.optim.Optimizer]
    steps: InnerSteps
    progress: Progress
    evaluate: Callable[[], EvaluationReport] | None
    initial: Callable[[], None] | None
    scaler: torch.amp.GradScaler | None
    writes: ForeignWrites
    ranks: Ranks = ALONE
    probe: Callable[[], EvaluationReport] | None = None
    points: ScheduleFreePoints = field(default_factory=ScheduleFreePoints)

    def scaler_state(self) -> dict[str, Any] | None:
        """Return the loss scale and its growth tracker; None without a scaler."""
        return None if self.scaler is None else self.scaler.state_dict()
