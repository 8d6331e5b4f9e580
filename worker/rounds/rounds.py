"""One worker's way through the rounds of classic DiLoCo: collect what the inner steps did, exchange it, do what the
coordinator says, begin the next round. (streaming.py: where training goes on meanwhile.)
"""

import logging
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from protocol.errors import CodecError, Problem
from protocol.messages import Action, Assignment, EvaluationReport
from protocol.spec import RunSpec
from worker.accounts.progress import Progress
from worker.errors import Resync, RunEnded, Stopped, UnexpectedAnswer, WorkLost
from worker.link import recovery, seeding
from worker.link.client import Client
from worker.link.membership import Membership
from worker.rounds.inner_steps import InnerSteps
from worker.rounds.sync import Sync
from worker.state.fragments import Fragments
from worker.state.outer_state import OuterState
from worker.state.work import Carry, Midway, UnitRanges, Work, count

_PAUSE_S = 0.2  # between long polls

LATE = "round %d closed without some of this worker's work: it goes into the next"

log = logging.getLogger(__name__)


class Save(Protocol):
    """Begins to write a snapshot; `partial`: the worker leaves in the middle of the round."""

    def __call__(self, work: Work | Midway, *, partial: bool = False) -> Future[None] | None: ...


class Rounds:
    """The assignment that one worker follows, and what of its own work is not in the run yet.

    assignment       the latest that was followed
    carry            late work, part of the next contribution
    training         in the middle of a round's inner steps
    maybe_state_0    the model is as it was built: no other state has been loaded yet
    finished         there is no next round: the run is over, or the worker was asked to stop
    """

    def __init__(
        self,
        client: Client,
        membership: Membership,
        spec: RunSpec,
        fragments: Fragments,
        state: OuterState,
        sync: Sync,
        steps: InnerSteps,
        progress: Progress,
        evaluate: Callable[[], EvaluationReport] | None,
        beat_now: Callable[[], None],
    ) -> None:
        self._client, self._membership, self._spec = client, membership, spec
        self._fragments, self._state, self._sync = fragments, state, sync
        self._steps, self._progress, self._evaluate = steps, progress, evaluate
        self._beat_now = beat_now
        self._epoch = membership.epoch
        self.assignment = Assignment(action=Action.WAIT, reason="not asked yet", round=0)
        self.carry = Carry()
        self.training = False
        self.maybe_state_0 = True
        self.finished = False
        self._stands = False  # whether the model holds what the next round starts from

    # --- the end of a round ---------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """An inner step is done, and it was not the round's last."""

    def end(self, save: Save) -> None:
        """The inner steps are done: exchange what they did, and begin the next round. Raises Stopped."""
        # Where a GradScaler skipped every step, the units are spent all the same.
        work, carry = self._begin_work(self._steps.units_used or self.assignment.units), self.carry
        if self._spec.sync.inner_steps == "auto":
            self._beat_now()  # the next round's H depends on how fast this one went

        def gather(p: int) -> None:
            self._gather(work, p, carry)
            self._progress.phase("sync")

        self._synchronise(work, gather, partial(save, work))
        self._progress.end_round(work.round, self._membership.epoch)
        self.begin_next()

    def hand_in(self, save: Save) -> None:
        """Leaving in the middle of a round: contribute the inner steps that were done. The other units return to the
        pool as the worker leaves."""
        units = self._steps.units_used
        if not self.training or not (units or self.carry.units):
            return
        work = self._begin_work(units)
        for p in range(len(self._state)):
            self._gather(work, p, self.carry)
        save(work, partial=True)  # for a fragment that does not get through
        self._sync.hand_in([work.piece(p) for p in range(len(self._state))])

    def resume(self, saved: Work | Midway, *, partial: bool) -> None:
        """Go on where the last process with this state directory saved its last snapshot."""
        assert isinstance(saved, Work), "the spec says how a run is saved, and never changes"
        self._progress.phase("sync")
        self._synchronise(saved)
        if partial and not self.carry.units:
            self._membership.start_over()  # the units that were left may still be ours, if nobody could be told

    def close(self) -> None:
        """Leave nothing running behind."""

    def _begin_work(self, units: UnitRanges) -> Work:
        """What the round so far is worth and was trained on; its pseudo-gradients are still to be gathered."""
        round_number, steps, carry = self.assignment.round, self._steps.done, self.carry
        loss = self._progress.end_inner_steps(steps, steps * self._spec.unit_tokens) if steps else carry.loss
        self._check_finite(loss, self._fragments.norm())  # of all of it, before any of it is sent
        self.training = False
        weight = count(units) or carry.weight
        return Work(round_number, carry.units + units, weight, carry.inner_steps + steps, loss, [], [], carry.late)

    def _gather(self, work: Work, p: int, carry: Carry) -> None:
        """Add fragment p to `work`."""
        delta = self._sound(p, self._pseudo_gradient(p, carry))
        norm = float(torch.linalg.vector_norm(delta))
        self._check_finite(work.loss, norm)
        work.deltas.append(delta)
        work.norms.append(norm)

    def _pseudo_gradient(self, p: int, carry: Carry) -> Tensor:
        """Of fragment p, as it is now, float32[n], in host memory."""
        delta = self._fragments.pseudo_gradient(p, self._state.theta[p], carry.delta(p))
        return self._fragments.in_host_memory(delta)

    def _sound(self, p: int, delta: Tensor) -> Tensor:
        """`delta`, which was taken against the outer state of fragment p; zeros if bits of that have flipped."""
        if not self._state.is_sound(p):
            log.error("round %d: the memory of fragment %d's outer state changed by itself", self.assignment.round, p)
            delta.zero_()  # nobody knows it any more; the coordinator will refuse it for its base, and tell of it
        return delta

    def _check_finite(self, loss: float, norm: float) -> None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise CodecError(
                f"round {self.assignment.round}: the training has diverged: loss {loss}, norm {norm}; nothing of that "
                "was sent; lower the learning rate or clip gradients, in a new run"
            )

    def _synchronise(
        self,
        work: Work,
        gather: Callable[[int], object] = lambda p: None,
        save: Callable[[], Future[None] | None] = lambda: None,
    ) -> None:
        """Contribute, and step the outer state by what everybody contributed. `gather`, `save`: as in `Sync.run`."""
        self.carry = Carry()
        with self._or_dropped(work.round):
            try:
                self.carry = self._sync.run(work, gather, save)
            except WorkLost:
                # The lease had ended and the units went back to the pool. If nobody took them, they are ours again.
                if not self._is_ours(self._ask(), work.round, work.units):
                    raise
                self.carry = self._sync.run(work)
        if self.carry.late:
            log.warning(LATE, work.round)

    @contextmanager
    def _or_dropped(self, round_number: int) -> Iterator[None]:
        """The work of the round is dropped where the coordinator cannot take it; then a later state is the way on."""
        try:
            yield
        except (Resync, WorkLost) as error:
            log.warning("round %d: %s; this round's work is dropped", round_number, error)
            if isinstance(error, Resync):
                self._state.round = None
            self._membership.start_over()
        except RunEnded as error:
            log.info("%s", error)

    @staticmethod
    def _is_ours(asked: Assignment, round_number: int, units: UnitRanges) -> bool:
        return asked.action is Action.TRAIN and asked.round == round_number and asked.units == units

    # --- between rounds -------------------------------------------------------------------------------------------

    def begin_first(self) -> None:
        """As `begin_next`, and what the last process left behind goes back to where it came from."""
        asked, resumed = self._ask(), self._state.round is not None
        if resumed and asked.action is Action.RECOVER:
            self._fall_behind()
        if not self._follow(asked):
            self.begin_next()

    def _fall_behind(self) -> None:
        """Rounds went by without this worker: the units that its last process had for them return to the pool, if
        nothing that was trained on them goes into the next contribution."""
        if not self.carry.units:
            self._membership.start_over()

    def begin_next(self) -> None:
        """Do what the coordinator says until there are units to train on, or the run is over."""
        while not self._follow(self._ask()):
            pass

    def _ask(self) -> Assignment:
        self._epoch = self._membership.epoch
        return self._without_lost_work(lambda: self._question(self._state.round, self.carry.units))

    def _without_lost_work(self, ask: Callable[[], Assignment]) -> Assignment:
        """The answer; where units whose work is carried are not this worker's any more, that to the same without it."""
        try:
            return ask()
        except Problem as problem:
            if problem.slug != "units-not-held":
                raise
            log.warning("the work that was carried is dropped: %s", problem.detail)
        self._drop()
        return self._question(self._state.round, [])

    def _question(self, state_round: int | None, carried: UnitRanges) -> Assignment:
        worker, report = self._membership.worker, self._progress.last_report
        return self._membership.act(lambda token: self._client.assignment(token, worker, state_round, carried, report))

    def _follow(self, assignment: Assignment) -> bool:
        """Whether training can go on, or is over; otherwise ask again."""
        match assignment.action:
            case Action.SEED:
                self._progress.phase("seed")
                self._seed()
            case Action.RECOVER:
                self._progress.phase("recover")
                self._take_back()
                held = 0 if self.maybe_state_0 else self._state.round
                self.maybe_state_0 = False
                recovery.recover(self._client, self._spec, self._state, assignment.round, held=held)
            case Action.WAIT:
                self._progress.phase("wait")
                if assignment.reason != self.assignment.reason:
                    log.info("waiting: %s", assignment.reason)
                self.assignment = assignment
                self._client.pause(_PAUSE_S)
            case Action.TRAIN | Action.FINISH:
                self._begin(assignment)
                return True
        return False

    def _begin(self, assignment: Assignment) -> None:
        """Start from the global parameters, and from what of our own progress is not in them yet."""
        self.assignment, self.training = assignment, False
        if assignment.action is Action.FINISH:
            log.info("done: %s", assignment.reason)
            self.finished, self.carry = True, Carry()
            if assignment.round != self._state.round:  # told to leave before this worker had the run's state
                return
        self._steps.begin(assignment)
        if assignment.round != self._state.round:
            raise UnexpectedAnswer(f"asked to train on state {assignment.round} while holding {self._state.round}")
        stands = self._stands and assignment.action is Action.TRAIN
        if not stands or assignment.evaluate:
            local = [self._fragments.gather(p) for p in range(len(self._fragments))] if stands else None
            self._evaluate_global(assignment)
            self._load(local)
        if assignment.action is Action.TRAIN:
            self.training = True
            self._progress.begin_round(assignment.round)

    def _evaluate_global(self, assignment: Assignment) -> None:
        """The global parameters into the model, and their held-out loss to the coordinator if it asks for it."""
        for p in range(len(self._fragments)):
            self._fragments.rebase(p, self._state.theta[p], None)
        if assignment.evaluate and self._evaluate is not None:
            self._progress.phase("evaluate")
            report = self._evaluate()
            log.info("state %d: held-out loss %.4f", assignment.round, report.loss)
            self._membership.act(lambda token: self._client.report_evaluation(token, assignment.round, report))

    def _load(self, local: list[Tensor] | None) -> None:
        """Put `local` into the model, which holds the global parameters; None: what of our progress is not in these."""
        for p in range(len(self._fragments)):
            carried = self.carry.delta(p)
            if local is not None:
                self._fragments.scatter(p, local[p])
            elif carried is not None:
                self._fragments.rebase(p, self._state.theta[p], carried)

    def _take_back(self) -> None:
        """Before another state is loaded: of what was trained, all that is to be kept is in `carry`."""

    def _drop(self) -> None:
        """What was done since the last contribution is not wanted."""
        self.carry, self.training = Carry(), False

    @property
    def lease_ended(self) -> bool:
        """Whether the worker had to join again since it asked for its assignment."""
        return self._membership.epoch != self._epoch

    def still_wanted(self) -> bool:
        """The lease ended in the middle of a round, or the coordinator says stop: is this round's work still wanted?

        Where it is not, it is dropped and the next round begins, if there is one.
        """
        trained = self.assignment
        try:
            asked = self._ask()
            if self.training and self._is_ours(asked, trained.round, trained.units):
                return True
            log.warning("the work on round %d is dropped: %s", trained.round, asked.reason)
            self._drop()
            if self._state.round != asked.round or not self._follow(asked):
                self.begin_next()
        except Stopped:
            self.finished = True
        return False

    def _seed(self) -> None:
        self.maybe_state_0 = False
        try:
            seeding.seed(self._client, self._membership, self._spec, self._fragments, self._state)
        except Problem as problem:
            if problem.slug != "state-conflict":
                raise
            log.warning("%s", problem.detail)  # another worker was asked to in the meantime
            self.maybe_state_0 = True
            self._client.pause(_PAUSE_S)
