"""DiLoCo on one worker: DiLoCo (arXiv 2311.08105, algorithm 1) and, by another schedule, Streaming DiLoCo (2501.18512,
algorithm 2) and eager updates (2502.12996).

Each fragment is sent after an inner step of its own and merged some inner steps later, or none (schedule.py). What a
worker has trained that no mean has, `carry`, is part of its next pseudo-gradient: what the mean lacks of late work,
what the codec left out, and what was trained while the fragment travelled. The compute waits only where a merge is due
and its delta is not there; that is the stage `sync`.
"""

import logging
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from protocol.errors import OuterstepError, Problem, Remedy, UnexpectedAnswer
from protocol.messages import Action, Assignment, EvaluationReport
from worker.errors import ModelError, Resync, RunEnded, Stopped, Unwanted, WorkLost
from worker.link.membership import Heartbeat
from worker.rounds.assignments import Assignments
from worker.rounds.exchange import Exchange
from worker.rounds.flight import Flight
from worker.rounds.round import Durable, Round
from worker.rounds.schedule import Approach
from worker.rounds.training import Training
from worker.state.fragments import host_copy
from worker.state.optimizer_state import (
    keep_changed_settings,
    load_local_state,
    local_state,
    settings,
    stretches,
    with_each_tensor,
)
from worker.state.saver import Saver
from worker.state.work import Carry, RoundStart, UnitRanges, Work, first_units, units_left

log = logging.getLogger(__name__)


class Rounds:
    """One worker's way through the rounds. `advance` does what is due between two inner steps.

    assignment    the latest that was begun
    carry         progress that no mean had when its round began, or ended
    finished      there is no next round: the run is over, or the worker was asked to stop
    """

    def __init__(self, exchange: Exchange, training: Training, saver: Saver, heartbeat: Heartbeat) -> None:
        self._exchange, self._state, self._sync = exchange, exchange.state, exchange.spec.sync
        self._training, self._fragments, self._ranks = training, training.fragments, training.ranks
        self._saver, self._heartbeat = saver, heartbeat
        self._approach = Approach(exchange.client.clock)
        self._assignments = Assignments(
            exchange, training.fragments, training.progress, training.initial, training.ranks
        )
        self._settings = [settings(each) for each in training.optimizers]  # before a snapshot brings others
        self._running = self.algorithm()
        self.assignment = Assignment(action=Action.WAIT, reason="not asked yet", round=0)
        self.carry = Carry()
        self.finished = False
        self._round: Round | None = None  # whose inner steps are being done
        self._epoch = exchange.membership.epoch  # of the membership when it asked last
        self._asked_ahead: Future[tuple[int, Assignment]] | None = None
        self._placed = False  # whether the model holds what the next round starts from
        self._trained_on: set[int] = set()  # the fragments that have been trained on since they were merged
        self._news = False
        self._start_saved: Future[None] | None = None  # the writing of what the next round starts from

    @property
    def training(self) -> bool:
        """True if the inner steps of a round are being done."""
        return self._round is not None

    @property
    def units_to_come(self) -> UnitRanges:
        """The units to train on after the one in hand, as far as they are known: this round's, and the next one's as
        soon as its assignment came ahead."""
        if self._round is None:
            return []
        ahead = self._round.arrival
        if ahead is None or not ahead.done() or ahead.exception() is not None:
            return self._training.steps.units_to_come
        _, asked = ahead.result()
        return self._training.steps.units_to_come + first_units(asked.units, asked.inner_steps)

    def begin(self) -> None:
        """Go on from the snapshot if there is one, and begin the first round."""
        self._advance(lambda: next(self._running))

    @property
    def has_news(self) -> bool:
        """True if the lease ended since this worker has asked last, or the coordinator said stop: the process that
        holds the lease learns of it."""
        joined_again = self._ranks.is_first and self._exchange.membership.epoch != self._epoch
        return joined_again or self._heartbeat.run_ended.is_set()

    def advance(self, *, ended: bool, news: bool) -> None:
        """Do what is due after an inner step; after the round's last one, `ended`, begin the next round. `news`: the
        first process has news."""
        self._news = news
        self._advance(lambda: self._running.send(ended))

    def _advance(self, resume: Callable[[], None]) -> None:
        try:
            resume()
        except (Stopped, StopIteration):
            self.finished = True

    # --- the algorithm --------------------------------------------------------------------------------------------

    def algorithm(self) -> Generator[None, bool, None]:
        """The algorithm. Yields where the training loop does an inner step; is sent whether it was its round's last."""
        asked = self._resume()
        while (round_ := self._begin(self._prepared(asked))) is not None:  # θ_local = θ_global − carry
            try:
                round_.send_due()  # eager updates: what the round before has trained
                while not round_.ended:
                    round_.ended = yield  # θ_local takes an inner step
                    self._note_inner_step(round_)
                    round_.send_due()  # Δ = θ_global − θ_local: to the coordinator, which averages
                    self._reclaiming(round_, round_.merge_due)  # θ_global steps by the mean; θ_local = θ_global − carry
                self._end(round_)
            except (Resync, WorkLost, RunEnded, Unwanted) as error:
                self._drop(round_, error)
            asked = self._ask()

    def _begin(self, assignment: Assignment) -> Round | None:
        """Begin the round from the global parameters less `carry`; return None where the run is over: then the model is
        what the outer optimizer has reached, as an export of the run is."""
        self.assignment = assignment
        over = assignment.action is Action.FINISH
        if over:
            log.info("done: %s", assignment.reason)
            self.finished = True
            self._forget()
            if assignment.round != self._state.round:  # told to leave before this worker had the run's state
                return None
        self._training.steps.begin(assignment)
        if assignment.round != self._state.round:
            raise UnexpectedAnswer(f"asked to train on state {assignment.round} while holding {self._state.round}")
        if over:
            self._reach(assignment)
            self._training.points.end()
            return None
        self._place(assignment)
        durable = Durable(start=self._start_saved) if self._sync.streams else Durable(save=self._save)
        self._round = Round(self._exchange, self._training, assignment, self.carry, durable, self._ask_ahead)
        self._training.progress.begin_round(assignment.round)
        self._saver.save_state()
        return self._round

    def _place(self, assignment: Assignment) -> None:
        """Put into the model what the inner steps start from; on the way there, it is evaluated if that is wanted."""
        fragments = range(len(self._state))
        if not self._placed:
            for p in fragments:
                self._fragments.rebase(p, self._state.theta[p], self.carry.delta(p))
        if self._evaluation(assignment) is None:
            return
        local = {p: self._fragments.gather(p) for p in self._trained_on}
        self._reach(assignment)
        for p in fragments:
            if p in local:
                self._fragments.scatter(p, local[p])
            else:
                self._fragments.rebase(p, self._state.theta[p], self.carry.delta(p), moves=False)

    def _evaluation(self, assignment: Assignment) -> Callable[[], EvaluationReport] | None:
        """Return what measures the held-out loss, if the coordinator asks this worker for it and it can."""
        return self._training.evaluate if assignment.evaluate else None

    def _reach(self, assignment: Assignment) -> None:
        """Put into the model what the outer optimizer has reached, and tell its held-out loss if that is wanted."""
        for p in range(len(self._state)):
            self._fragments.scatter(p, self._state.reached(p))
        evaluate = self._evaluation(assignment)
        if evaluate is not None:
            self._tell_evaluation(assignment.round, evaluate)

    def _tell_evaluation(self, state_round: int, evaluate: Callable[[], EvaluationReport]) -> None:
        self._training.progress.phase("evaluate")
        report = evaluate()
        log.info("state %d: held-out loss %.4f", state_round, report.loss)
        client, membership = self._exchange.client, self._exchange.membership

        def tell(token: str) -> None:
            try:
                client.report_evaluation(token, state_round, report)
            except Problem as problem:
                if problem.remedy is not Remedy.ACT:
                    raise
                log.warning("the held-out loss of state %d is not wanted: %s", state_round, problem.detail)

        self._ranks.by_first(lambda: membership.act(tell))

    def _note_inner_step(self, round_: Round) -> None:
        """Note that an inner step is done. Raises Unwanted where the round's work is not wanted any more."""
        self._check_wanted()
        due = round_.next_sent
        if due is not None and self._approach.is_near(round_.assignment.round, due, due - self._training.steps.done):
            self._exchange.client.open_ahead()
        if round_.ended:
            round_.note_speed()
            if self._sync.inner_steps == "auto":
                self._heartbeat.beat_now()  # the next round's H depends on how fast this one went

    def _end(self, round_: Round) -> None:
        """All fragments are merged: carry on what no mean has, and save it where the round's work is not saved."""
        self._settle(round_)
        self._training.progress.end_round(round_.assignment.round, self._exchange.membership.epoch)
        if self._training.protection is not None:
            count = self._training.protection.contributions
            log.info("%g contributions have left this worker under [privacy]", count)
        if self._sync.streams:
            local = [self._fragments.in_host_memory(self._fragments.gather(p)) for p in range(len(self._state))]
            self._start_saved = self._save(RoundStart(round_.assignment.round + 1, local, self.carry))

    def _settle(self, round_: Round) -> None:
        self.carry, self._asked_ahead = round_.settle()
        self._trained_on, self._placed, self._round = round_.trained_on, True, None

    def _reclaiming(self, round_: Round, act: Callable[[], None]) -> None:
        """`act`; where the lease had ended, the units went back to the pool. If nobody took them, they are ours again,
        and the round's work is contributed again, if all of it is at hand and nothing of it is carried: units that are
        dealt again are of this round, and weigh."""
        try:
            act()
        except WorkLost:
            at_hand = round_.has_all_work and all(each.all_weighs for each in round_.work)
            if not all(self._ranks.all(at_hand)) or not self._holds_again(round_):
                raise
            round_.contribute(round_.work)

    def _holds_again(self, round_: Round) -> bool:
        """Return True if the units of the round's work, asked for anew, are this worker's."""
        self._epoch, asked = self._assignments.ask(self._held(), [])
        return self._ranks.by_first(lambda: _is_for(asked, round_.assignment.round, round_.work[0].units))

    def _drop(self, round_: Round, error: OuterstepError) -> None:
        """Drop the work of a round that the coordinator cannot take or does not want; then a later state is the way
        on."""
        if isinstance(error, RunEnded):
            log.info("%s", error)
        else:
            log.warning("round %d: %s; this round's work is dropped", round_.assignment.round, error)
        round_.abandon()
        self._forget()
        if isinstance(error, Resync):
            self._state.round = None
        self._state.round = self._held()
        if isinstance(error, Resync | WorkLost):
            self._exchange.membership.start_over()

    def _forget(self) -> None:
        """Keep nothing of what was trained since the last contribution."""
        self.carry, self._round, self._asked_ahead = Carry(), None, None
        self._placed, self._trained_on = False, set()

    def _held(self) -> int | None:
        """Return the round of the outer state, None where that of another process of this worker is at another one."""
        return self._ranks.agreed(self._state.round)

    # --- between rounds -------------------------------------------------------------------------------------------

    def _ask(self) -> Assignment:
        """Ask what to do, or take the answer that came ahead. Carried work whose units are not this worker's any more
        is dropped."""
        ahead, self._asked_ahead = self._asked_ahead, None
        try:
            self._epoch, asked = ahead.result() if ahead else self._assignments.ask(self._held(), self.carry.units)
        except Problem as problem:
            if problem.slug != "units-not-held":
                raise
            log.warning("the work that was carried is dropped: %s", problem.detail)
            self._forget()
            self._epoch, asked = self._assignments.ask(self._held(), [])
        return asked

    def _ask_ahead(self, flight: Flight) -> tuple[int, Assignment]:
        """All fragments are stepped, so the next round's assignment can be had before this one's inner steps are done:
        on a thread of the flight."""
        _ = self._state.digests  # from now on, a flipped bit is noticed
        used = first_units(self.assignment.units, self.assignment.inner_steps)
        left = [] if flight.superseded else units_left(self.carry.units + used, flight.consumed)
        return self._assignments.ask(flight.round + 1, left)

    def _check_wanted(self) -> None:
        """Raise Unwanted where the lease ended in the middle of the round, or the coordinator said stop, and the work
        on this round is not wanted any more."""
        if not self._news:
            return
        self._heartbeat.run_ended.clear()
        trained, held = self.assignment, self._held()
        try:
            self._epoch, asked = self._assignments.ask(trained.round if held is None else held, self.carry.units)
        except Problem as problem:
            if problem.slug != "units-not-held":
                raise
            raise Unwanted(problem.detail) from problem
        if not _is_for(asked, trained.round, trained.units):
            raise Unwanted(asked.reason)

    def _prepared(self, asked: Assignment) -> Assignment:
        """Do what the coordinator says until there is a round to train, or the run is over; return that assignment."""
        while asked.action not in (Action.TRAIN, Action.FINISH):
            if asked.action is not Action.WAIT:
                self._take_back(asked.round)
            self._assignments.prepare(asked)
            asked = self._ask()
        return asked

    def _take_back(self, to_round: int) -> None:
        """Before another state, that of round `to_round`, is loaded: carry all of the progress that is in the model;
        unless the run has gone back to a backup, and the rounds that were missed are still to come."""
        if not all(self._ranks.all(self.carry.is_of_rounds_before(to_round))):
            log.warning("the run went back to round %d: the work of later rounds is dropped", to_round)
            self._forget()
            return
        sent, ahead = replace(self.carry, ahead={}), dict(self.carry.ahead)
        for p in self._trained_on:
            local = self._fragments.gather_from_all(p)
            if not self._fragments.owns(p):
                continue
            delta = self._fragments.pseudo_gradient(p, self._state.theta[p], self.carry.delta(p), local)
            carried = sent.delta(p)
            ahead[p] = delta if carried is None else delta - carried
        self.carry, self._placed, self._trained_on = replace(self.carry, ahead=ahead), False, set()

    # --- snapshots, and the beginning and the end of the process --------------------------------------------------

    def _save(self, work: Work | RoundStart, *, partial: bool = False) -> Future[None] | None:
        """Begin to write the snapshot; `partial`: the worker leaves in the middle of the round."""

        def optimizers() -> list[dict[str, Any]]:
            taken = [local_state(each) for each in self._training.optimizers]
            # They stand still while work is written; where a round starts, the training goes on meanwhile.
            return with_each_tensor(taken, host_copy) if isinstance(work, RoundStart) else taken

        return self._saver.save(
            work,
            partial=partial,
            optimizers=optimizers,
            held=lambda: [stretches(each) for each in self._training.optimizers],
            settings=self._settings,
            scaler=self._training.scaler_state,
            warmup_left=self._training.steps.warmup_left or 0,
        )

    def _resume(self) -> Assignment:
        """Go on from the last process's snapshot, if there is one; return the first assignment."""
        found = self._saver.load(self._training.optimizers)
        if found is None:
            self._state.round = None
            self._state.take(self._fragments)
            return self._ask()
        self._assignments.untouched, self._training.steps.warmup_left = False, found.warmup_left
        if isinstance(found.work, Work):
            self._put_back(found.work)
        optimizers, saved = self._training.optimizers, found.inner_optimizers
        try:
            if len(optimizers) != len(saved):
                raise ValueError(f"there are {len(optimizers)} of them, and {len(saved)} in the snapshot")
            for optimizer, state in zip(optimizers, saved, strict=True):
                load_local_state(optimizer, state)
            for optimizer, before, now in zip(optimizers, found.settings, self._settings, strict=False):
                keep_changed_settings(optimizer, before, now)
        except ValueError as error:
            raise ModelError(
                f"the inner optimizers are not those of the snapshot in this state_dir: {error}"
            ) from error
        if self._training.scaler is not None and found.scaler is not None:  # the last process may have had none
            self._training.scaler.load_state_dict(found.scaler)
        log.info("resuming with the work of round %d", found.work.round)
        if isinstance(found.work, Work):
            self._contribute(found.work, partial=any(self._ranks.all(found.partial)))
        else:
            self._start_from(found.work)
        asked = self._ask()
        if asked.action is Action.RECOVER and self._state.round is not None:
            # Rounds went by without this worker. Where it was in the middle of one, which of the units have been
            # consumed is not known any more, so the little that was not sent is trained again.
            if isinstance(found.work, RoundStart):
                self._forget()
            if not self.carry.units:
                self._exchange.membership.start_over()
        return asked

    def _contribute(self, work: Work, *, partial: bool) -> None:
        """Contribute what was saved. What of it had got through already is accepted as the same."""

        def in_common() -> Carry:
            first = work.contributions[0]
            return Carry(units=first.units, weight=first.weight, inner_steps=first.inner_steps, loss=first.loss)

        carry = self._ranks.by_first(in_common)
        nothing_new = Assignment(action=Action.TRAIN, reason="resumed", round=work.round)
        round_ = Round(self._exchange, self._training, nothing_new, carry, Durable(), self._ask_ahead)
        self._training.progress.phase("sync")
        try:
            self._reclaiming(round_, lambda: round_.contribute(work.contributions))
            self._settle(round_)
        except (Resync, WorkLost, RunEnded) as error:
            self._drop(round_, error)
        if partial and not self.carry.units:
            self._exchange.membership.start_over()  # the units that were left may still be ours, if nobody was told

    def _put_back(self, work: Work) -> None:
        """Put into the model what it was as the work was saved, θ − Δ, but for rounding: what the optimizers keep
        beside the parameters was there with them."""
        deltas = {each.fragment: each.unclipped for each in work.contributions}
        for p in range(len(self._state)):
            self._fragments.rebase(p, self._state.theta[p], deltas.get(p))

    def _start_from(self, start: RoundStart) -> None:
        for p, local in enumerate(start.local):
            self._fragments.scatter(p, local)
        self.carry, self._placed, self._trained_on = start.carry, True, set(range(len(start.local)))

    def hand_in(self) -> None:
        """Leaving in the middle of a round: contribute the inner steps that were done. The other units return to the
        pool as the worker leaves."""
        if self._round is None:
            return
        changed = [each for each in self._ranks.all(self._training.writes.changed()) if each is not None]
        if changed:
            log.warning(
                "round %d: this round's inner steps are not handed in: the model's parameters, %s for one, hold other "
                "values than the last step left, such as EMA weights that were swapped in",
                self._round.assignment.round,
                changed[0],
            )
            return
        unsent = self._round.unsent()
        if all(self._ranks.all(len(unsent) == len(self._state.own))) and not self._sync.streams:
            # For a fragment that does not get through.
            self._save(Work(self._round.assignment.round, unsent), partial=True)
        if unsent:
            self._exchange.hand_in(unsent)

    def close(self) -> None:
        """Leave nothing running behind."""
        if self._round is not None and self._round.under_way:
            self._exchange.client.stop.set()  # nobody waits for what comes back any more
            self._round.abandon()


def _is_for(asked: Assignment, round_number: int, units: UnitRanges) -> bool:
    """Return True if `asked` is to train on `units` in round `round_number`."""
    return asked.action is Action.TRAIN and asked.round == round_number and asked.units == units
