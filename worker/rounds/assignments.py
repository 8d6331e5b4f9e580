"""Asking the coordinator what to do, and what comes before training: seeding the run, recovering its state, waiting."""

import logging
from collections.abc import Callable
from functools import partial

from torch import Tensor

from protocol.errors import Problem, Remedy
from protocol.messages import Action, Assignment, EvaluationReport, WithoutLosses, WithoutReport
from protocol.wire import Payload
from worker.accounts.progress import Progress
from worker.joining import recovery
from worker.ranks import Ranks
from worker.rounds.exchange import Exchange
from worker.state.fragments import Fragments
from worker.state.work import UnitRanges

_PAUSE_S = 0.2  # between long polls

log = logging.getLogger(__name__)


class Assignments:
    """Asks for assignments and prepares for them. `exchange` has the membership that asks, and the outer state;
    `initial` loads state 0 into the model, None if the model holds it. With several `ranks`, the first one asks, and
    all do what the answer says."""

    def __init__(
        self,
        exchange: Exchange,
        fragments: Fragments,
        progress: Progress,
        initial: Callable[[], None] | None,
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        self._exchange, self._membership, self._client = exchange, exchange.membership, exchange.client
        self._fragments, self._progress, self._initial = fragments, progress, initial
        self._reason = ""  # for waiting, as last logged
        # Whether the outer state was taken from the model as it was built, and so may be state 0.
        self.untouched = initial is None

    def ask(self, state_round: int | None, carried: UnitRanges) -> tuple[int, Assignment]:
        """Ask what to do at state `state_round` of the run. Return the epoch of the membership that asked, and the
        answer."""
        return self._ranks.on_first(lambda: self._ask(state_round, carried))

    def _ask(self, state_round: int | None, carried: UnitRanges) -> tuple[int, Assignment]:
        worker, report = self._membership.worker, self._progress.unsent
        epoch, rows = self._membership.epoch, self._membership.rows
        ask = lambda token: self._client.assignment(token, worker, state_round, carried, report, rows)  # noqa: E731
        answer = self._membership.act(ask)
        self._progress.note_sent(report)
        return epoch, answer

    def prepare(self, assignment: Assignment) -> None:
        """Seed the run, recover its outer state, or wait, as `assignment` says. Then ask again."""
        match assignment.action:
            case Action.SEED:
                self._progress.phase("seed")
                self._seed()
            case Action.RECOVER:
                self._progress.phase("recover")
                state = self._exchange.state
                held, self.untouched = 0 if self.untouched else state.round, False
                client, spec = self._client, self._exchange.spec
                self._ranks.together(lambda: recovery.recover(client, spec, state, assignment.round, held=held))
            case Action.WAIT:
                self._progress.phase("wait")
                if assignment.reason != self._reason:
                    log.info("waiting: %s", assignment.reason)
                self._reason = assignment.reason
                self._pause()

    def report_evaluation(self, asked: Assignment, evaluate: Callable[[], EvaluationReport]) -> list[str]:
        """Measure the held-out loss of the model, which holds the state that `asked` is about, and report it. Return
        the workers without whose contribution the coordinator wants it measured, too."""
        self._progress.phase("evaluate")
        report, state_round = evaluate(), asked.round
        log.info("state %d: held-out loss %.4f", state_round, report.loss)

        def tell(token: str) -> list[str]:
            try:
                return self._client.report_evaluation(token, state_round, asked.redone, report).without
            except Problem as problem:
                if problem.remedy is not Remedy.ACT:
                    raise
                log.warning("the held-out loss of state %d was not accepted: %s", state_round, problem.detail)
                return []

        return self._ranks.on_first(lambda: self._membership.act(tell))

    def report_without(self, asked: Assignment, workers: list[str], evaluate: Callable[[], EvaluationReport]) -> None:
        """Measure the held-out loss at the two points of the state, then as it would be without the last contribution
        of each of `workers`, one at a time, and report all of them. The model then holds any of these."""
        state, state_round = self._exchange.state, asked.round

        def loss(point: Callable[[int], Tensor]) -> float:
            for p in range(len(state)):
                self._fragments.scatter(p, point(p))
                state.release(p)
            return evaluate().loss

        reached = WithoutLosses.model_construct(loss=loss(state.reached), without={})
        start = None
        if state.looks_ahead:
            start = WithoutLosses.model_construct(loss=loss(lambda p: state.start(p, None)), without={})
        try:
            for worker in workers:
                lacking = self._ranks.together(partial(self._differences, state_round, worker))
                reached.without[worker] = loss(lambda p: state.reached(p, lacking.get(p)))  # noqa: B023, called at once
                if start is not None:
                    start.without[worker] = loss(lambda p: state.start(p, lacking.get(p)))  # noqa: B023
            report = WithoutReport(reached=reached, start=start)
            tell = partial(self._client.report_without, state_round=state_round, redone=asked.redone, report=report)
            self._ranks.on_first(lambda: self._membership.act(tell))
        except Problem as problem:
            if problem.remedy is not Remedy.ACT:
                raise
            log.info("state %d without single contributions: %s", state_round, problem.detail)
            return
        log.info("state %d: held-out loss %.4f, without %s", state_round, reached.loss, reached.without)

    def _differences(self, state_round: int, worker: str) -> dict[int, Payload]:
        """Return the last means without `worker` minus those of all, by fragment that this process owns."""
        state, client = self._exchange.state, self._client
        return {
            p: self._membership.act(
                partial(client.without, state_round=state_round, p=p, worker=worker, elements=len(state.theta[p]))
            )
            for p in state.own
        }

    def _seed(self) -> None:
        self.untouched = False
        try:
            spec, state = self._exchange.spec, self._exchange.state
            recovery.seed(self._membership, spec, self._fragments, state, self._initial, self._ranks)
        except Problem as problem:
            if problem.slug != "state-conflict":
                raise
            log.warning("%s", problem.detail)  # another worker was asked to seed in the meantime
            self.untouched = True
            self._pause()

    def _pause(self) -> None:
        self._ranks.on_first(lambda: self._client.pause(_PAUSE_S))
