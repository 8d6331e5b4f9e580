"""One worker's way through the rounds: collect what the inner steps did, exchange it, do what the coordinator says,
begin the next round.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from protocol.errors import CodecError, Problem
from protocol.messages import Action, Assignment, EvaluationReport
from protocol.spec import RunSpec
from worker import recovery, seeding
from worker.client import Client
from worker.errors import Resync, RunEnded, Stopped, UnexpectedAnswer, WorkLost
from worker.fragments import Fragments
from worker.inner_steps import InnerSteps
from worker.membership import Membership
from worker.outer_state import OuterState
from worker.progress import Progress
from worker.sync import Sync
from worker.work import Carry, UnitRanges, Work, count

_PAUSE_S = 0.2  # between long polls

log = logging.getLogger(__name__)


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
    ) -> None:
        self._client, self._membership, self._spec = client, membership, spec
        self._fragments, self._state, self._sync = fragments, state, sync
        self._steps, self._progress, self._evaluate = steps, progress, evaluate
        self._epoch = membership.epoch
        self.assignment = Assignment(action=Action.WAIT, reason="not asked yet", round=0)
        self.carry = Carry()
        self.training = False
        self.maybe_state_0 = True
        self.finished = False

    # --- the end of a round ---------------------------------------------------------------------------------------

    def collect(self, units: UnitRanges) -> Work:
        """The pseudo-gradients of the round so far, and what they were trained on."""
        round_number, steps, carry = self.assignment.round, self._steps.done, self.carry
        loss = self._progress.end_inner_steps(steps, steps * self._spec.unit_tokens) if steps else carry.loss
        deltas = []
        for p, theta in enumerate(self._state.theta):
            delta = self._fragments.pseudo_gradient(p, theta, carry.delta(p)).cpu()
            if not self._state.is_sound(p):
                log.error("round %d: the memory of fragment %d's outer state has changed by itself", round_number, p)
                delta.zero_()  # nobody knows it any more; the coordinator will refuse it for its base, and tell of it
            deltas.append(delta)
        norms = [float(torch.linalg.vector_norm(delta)) for delta in deltas]
        if not torch.isfinite(torch.tensor([loss, *norms])).all():
            raise CodecError(
                f"round {round_number}: the training has diverged: loss {loss}, pseudo-gradient norms {norms}; "
                "nothing was sent; lower the learning rate or clip gradients, in a new run"
            )
        self.training = False
        weight = count(units) or carry.weight
        return Work(
            round_number, carry.units + units, weight, carry.inner_steps + steps, loss, norms, deltas, carry.late
        )

    def synchronise(self, work: Work, saved: Future[None] | None) -> None:
        """Contribute, and step the outer state by what everybody contributed."""
        self._progress.phase("sync")
        self.carry = Carry()
        try:
            try:
                self.carry = self._sync.run(work, saved)
            except WorkLost:
                # The lease had ended and the units went back to the pool. If nobody took them, they are ours again.
                if not self._is_ours(self._ask(), work.round, work.units):
                    raise
                self.carry = self._sync.run(work, saved)
        except (Resync, WorkLost) as error:
            log.warning("round %d: %s; this round's work is dropped", work.round, error)
            if isinstance(error, Resync):
                self._state.round = None
            self._membership.start_over()
            return
        except RunEnded as error:
            log.info("%s", error)
            return
        if self.carry.late:
            log.warning("round %d closed without some of this worker's work: it goes into the next", work.round)

    @staticmethod
    def _is_ours(asked: Assignment, round_number: int, units: UnitRanges) -> bool:
        return asked.action is Action.TRAIN and asked.round == round_number and asked.units == units

    # --- between rounds -------------------------------------------------------------------------------------------

    def begin_first(self) -> None:
        """As `begin_next`, and what the last process left behind goes back to where it came from."""
        asked, resumed = self._ask(), self._state.round is not None
        if resumed and asked.action is Action.RECOVER and not self.carry.units:
            # Rounds went by without this worker: the units that its last process had for them return to the pool.
            self._membership.start_over()
        if not self._follow(asked):
            self.begin_next()

    def begin_next(self) -> None:
        """Do what the coordinator says until there are units to train on, or the run is over."""
        with ThreadPoolExecutor(1, "digest") as beside:
            digests = beside.submit(lambda: self._state.digests)  # while the coordinator thinks, and before training
            asked = self._ask()
            digests.result()
        while not self._follow(asked):
            asked = self._ask()

    def _ask(self) -> Assignment:
        self._epoch = self._membership.epoch
        state_round, carried = self._state.round, self.carry.units
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
        for p in range(len(self._fragments)):
            self._fragments.rebase(p, self._state.theta[p], None)
        if assignment.evaluate and self._evaluate is not None:
            self._progress.phase("evaluate")
            report = self._evaluate()
            log.info("state %d: held-out loss %.4f", assignment.round, report.loss)
            self._membership.act(lambda token: self._client.report_evaluation(token, assignment.round, report))
        for p in range(len(self._fragments)):
            if (carried := self.carry.delta(p)) is not None:
                self._fragments.rebase(p, self._state.theta[p], carried)
        if assignment.action is Action.TRAIN:
            self.training = True
            self._progress.begin_round(assignment.round)

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
            if self._is_ours(asked, trained.round, trained.units):
                return True
            log.warning("the work on round %d is dropped: %s", trained.round, asked.reason)
            self.carry, self.training = Carry(), False
            if not self._follow(asked):
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
