"""Where in its assignment a worker is: the inner steps that it has done, the units that it has used, and its place in
the learning rate's schedule."""

from protocol.messages import Assignment
from protocol.spec import RunSpec
from worker.state.units import UnitRanges, first_units


class InnerSteps:
    """Counts one worker's inner steps, round by round."""

    def __init__(self, spec: RunSpec) -> None:
        self._scheduled, self._warmup_steps = spec.sync.schedule_steps, spec.inner.joiner_warmup_steps
        self.done = 0
        self._round = self._own = self._units_begun = self._units_used = 0
        self._units: UnitRanges = []
        self.warmup_left: int | None = None  # until a joiner's inner optimizer is warm; None: not one step yet

    def begin(self, assignment: Assignment) -> None:
        """Nothing of `assignment`, which is of action `train`, is done yet."""
        self.done = self._units_begun = self._units_used = 0
        self._round, self._own, self._units = assignment.round, assignment.inner_steps, assignment.units
        if self.warmup_left is None:
            self.warmup_left = self._warmup_steps if assignment.round else 0

    def begin_unit(self) -> None:
        """The loop was given the next unit. A loop that takes no units here uses one per inner step."""
        self._units_begun += 1

    def step(self) -> None:
        """One inner step is done; a unit whose step was skipped before is used as well."""
        self.done += 1
        self._units_used = max(self._units_begun, self.done)
        if self.warmup_left:
            self.warmup_left -= 1

    @property
    def units_used(self) -> UnitRanges:
        """The units that the parameters have seen: the first ones of the assignment."""
        return first_units(self._units, self._units_used)

    @property
    def global_step(self) -> int:
        """(round + done / H) · H of the schedule."""
        progress = self.done * self._scheduled // self._own if self._own else self.done
        return self._round * self._scheduled + progress

    @property
    def warmup_scale(self) -> float:
        """1, or less during the first `inner.joiner_warmup_steps` steps of a worker that joined after round 0."""
        if not self.warmup_left:
            return 1.0
        return (self._warmup_steps - self.warmup_left + 1) / (self._warmup_steps + 1)
