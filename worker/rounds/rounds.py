"""The loop of rounds on one worker. The theory is in the package's docstring (worker/rounds/__init__.py).

The training waits only if a merge is due and its delta is not there: that time is the stage `sync`.
"""

import logging
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from protocol.errors import OuterstepError, Problem, UnexpectedAnswer
from protocol.messages import Action, Assignment, EvaluationReport
from worker.errors import ModelError, Resync, RunEnded, Stopped, Unwanted, WorkLost
from worker.link.membership import Heartbeat
from worker.process import give_back_free_memory
from worker.rounds.assignments import Assignments
from worker.rounds.exchange import Exchange
from worker.rounds.in_flight import InFlight
from worker.rounds.round import Durable, Round
from worker.rounds.schedule import Lookahead
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
    """One worker's rounds. `advance` does what is due between two inner steps.

    assignment    the latest one that was started
    carry         progress that was in no mean when its round started, or ended
    finished      no round follows: the run is over, or the worker was asked to stop
    """

    def __init__(self, exchange: Exchange, training: Training, saver: Saver, heartbeat: Heartbeat) -> None:
        self._exchange, self._state, self._sync = exchange, exchange.state, exchange.spec.sync
        self._training, self._fragments, self._ranks = training, training.fragments, training.ranks
        self._saver, self._heartbeat = saver, heartbeat
        self._lookahead = Lookahead(exchange.client.clock)
        self._assignments = Assignments(
            exchange, training.fragments, training.progress, training.initial, training.ranks
        )
        self._settings = [settings(each) for each in training.optimizers]  # before a snapshot loads others
        self._running = self.algorithm()
        self.assignment = Assignment(action=Action.WAIT, reason="not asked yet", round=0)
        self.carry = Carry()
        self.finished = False
        self._round: Round | None = None  # whose inner steps are being done
        self._epoch = exchange.membership.epoch  # of the membership that asked last
        self._asked_ahead: Future[tuple[int, Assignment]] | None = None
        self._start_loaded = False  # whether the model holds the next round's start
        self._trained_on: set[int] = set()  # fragments that were trained on since they were merged
        self._news = False
        self._start_saved: Future[None] | None = None  # the writing of the next round's start
        # The last round, if it closed before this worker had done its inner steps.
        self._behind_since: int | None = None

    @property
    def training(self) -> bool:
        """True while the inner steps of a round are being done."""
        return self._round is not None

    @property
    def units_to_come(self) -> UnitRanges:
        """The units to train on after the current one, as far as they are known: this round's, and the next round's
        once its assignment is there."""
        if self._round is None:
            return []
        ahead = self._round.arrival
        if ahead is None or not ahead.done() or ahead.exception() is not None:
            return self._training.steps.units_to_come
        _, asked = ahead.result()
        return self._training.steps.units_to_come + first_units(asked.units, asked.inner_steps)

    def begin(self) -> None:
        """Continue from the snapshot if there is one, and begin the first round."""
        self._advance(lambda: next(self._running))

    @property
    def has_news(self) -> bool:
        """True if the lease has ended since the last question, or the coordinator said stop. Only the process that
        holds the lease notices."""
        joined_again = self._ranks.is_first and self._exchange.membership.epoch != self._epoch
        return joined_again or self._heartbeat.run_ended.is_set()

    def advance(self, *, ended: bool, news: bool) -> None:
        """Do what is due after an inner step; after the round's last one (`ended`), begin the next round. `news`: the
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
        """The algorithm. It yields for each inner step of the training loop, and is sent whether that was the round's
        last."""
        asked = self._resume()
        while (round_ := self._begin(self._prepare(asked))) is not None:  # θ_local = θ_global − carry
            try:
                round_.send_due()  # eager updates: what was trained in the round before
                while not round_.over:
                    ended = yield  # one inner step of θ_local
                    self._note_inner_step(round_, ended=ended)
                    round_.send_due()  # Δ = θ_global − θ_local: to the coordinator, which averages
                    self._reclaim_if_lost(round_, round_.merge_due)  # θ_global: outer step; θ_local = θ_global − carry
                self._end(round_)
            except (Resync, WorkLost, RunEnded, Unwanted) as error:
                self._drop_work(round_, error)
            asked = self._ask()

    def _begin(self, assignment: Assignment) -> Round | None:
        """Begin the round from θ_global − carry. Return None if the run is over: then the model holds what the outer
        optimizer has reached, as an export does."""
        self.assignment = assignment
        over = assignment.action is Action.FINISH
        if over:
            log.info("done: %s", assignment.reason)
            self.finished = True
            self._forget()
            if assignment.round != self._state.round:  # told to finish before this worker had the run's state
                return None
        # What a worker carries that is behind, it sends at once.
        self._training.steps.begin(assignment, self.carry.steps_ahead if self._behind_since is None else 0)
        if assignment.round != self._state.round:
            raise UnexpectedAnswer(
                f"asked to train on state {assignment.round} while holding state {self._state.round}"
            )
        if over:
            if self._load_reached(assignment):
                return self._begin(self._prepare(self._ask()))  # the last round may be done again
            self._training.points.end()
            return None
        self._load_start(assignment)
        durable = Durable(start=self._start_saved) if self._sync.streams else Durable(save=self._save)
        since = assignment.round if self._behind_since is None else self._behind_since
        self._round = Round(
            *(self._exchange, self._training, assignment, self.carry, durable, self._ask_ahead),
            stale=max(assignment.round - since, 0),  # negative if the run was rolled back
        )
        self._training.progress.begin_round(assignment.round)
        self._saver.save_state()
        return self._round

    def _load_start(self, assignment: Assignment) -> None:
        """Load the start of the inner steps into the model, and evaluate on the way if asked to."""
        fragments = range(len(self._state))
        if not self._start_loaded:
            for p in fragments:
                self._fragments.rebase(p, self._state.theta[p], self.carry.part(p))
                self._state.release(p)
        if self._evaluation(assignment) is None:
            return
        local = {p: self._fragments.gather(p) for p in self._trained_on}
        self._load_reached(assignment)
        for p in fragments:
            if p in local:
                self._fragments.scatter(p, local[p])
            else:
                self._fragments.rebase(p, self._state.theta[p], self.carry.part(p), moves=False)

    def _evaluation(self, assignment: Assignment) -> Callable[[], EvaluationReport] | None:
        """Return the function that measures the held-out loss, if the coordinator asks for it and this worker has
        one."""
        return self._training.evaluate if assignment.evaluate else None

    def _load_reached(self, assignment: Assignment) -> bool:
        """Load what the outer optimizer has reached into the model, and report its held-out loss if asked to. Return
        True if the loss without single contributions was asked for, too."""
        for p in range(len(self._state)):
            self._fragments.scatter(p, self._state.reached(p))
            self._state.release(p)
        evaluate, probe = self._evaluation(assignment), self._training.probe
        if evaluate is None or probe is None:
            return False
        workers = self._assignments.report_evaluation(assignment, evaluate)
        if workers:
            self._assignments.report_without(assignment, workers, probe)
            for p in range(len(self._state)):
                self._fragments.scatter(p, self._state.reached(p))
                self._state.release(p)
        return bool(workers)

    def _note_inner_step(self, round_: Round, *, ended: bool) -> None:
        """Note one inner step; `ended`: the round's own steps are done. Raises Unwanted if the coordinator does not
        accept the round's work any more."""
        ends, round_.ended = ended and not round_.ended, ended
        self._check_wanted()
        due = round_.next_sent
        if due is not None and self._lookahead.is_near(round_.assignment.round, due, due - self._training.steps.done):
            self._exchange.client.open_ahead()
        if ends:
            round_.end_inner_steps()
            if self._sync.wait == "never":
                self._heartbeat.beat_now()  # the next round's H depends on the speed of this one

    def _end(self, round_: Round) -> None:
        """End the round, all fragments of which are merged. If its work is not saved, save the next round's start."""
        self._settle(round_)
        self._training.progress.end_round(round_.assignment.round, self._exchange.membership.epoch)
        if self._sync.streams:
            local = [self._fragments.in_host_memory(self._fragments.gather(p)) for p in range(len(self._state))]
            self._start_saved = self._save(RoundStart(round_.assignment.round + 1, local, self.carry))

    def _settle(self, round_: Round) -> None:
        self.carry, self._asked_ahead = round_.settle()
        self._trained_on, self._start_loaded, self._round = round_.trained_on, True, None
        self._behind_since = round_.assignment.round if round_.behind else None
        give_back_free_memory()

    def _reclaim_if_lost(self, round_: Round, act: Callable[[], None]) -> None:
        """Call `act`. If the lease had ended, the units are back in the pool; if they are assigned to this worker
        again, contribute the round's work again. That needs all of the work, with nothing carried in it: units that are
        assigned again belong to this round, and weigh."""
        try:
            act()
        except WorkLost:
            at_hand = round_.has_all_work and all(each.all_weighs for each in round_.work)
            if not all(self._ranks.all(at_hand)) or not self._holds_again(round_):
                raise
            round_.contribute(round_.work)

    def _holds_again(self, round_: Round) -> bool:
        """Return True if asking again assigns the units of the round's work to this worker."""
        self._epoch, asked = self._assignments.ask(self._held_round(), [])
        return self._ranks.on_first(lambda: _assigns(asked, round_.assignment.round, round_.work[0].units))

    def _drop_work(self, round_: Round, error: OuterstepError) -> None:
        """Drop the work of a round that the coordinator does not accept; a later state is the way on."""
        if isinstance(error, RunEnded):
            log.info("%s", error)
        else:
            log.warning("round %d: %s; this round's work is dropped", round_.assignment.round, error)
        round_.abandon()
        self._forget()
        if isinstance(error, Resync):
            self._state.begin_changes()
        if self._held_round() is None:  # the processes of this worker may hold different ones
            self._state.begin_changes()
        if isinstance(error, Resync | WorkLost):
            self._exchange.membership.start_over()

    def _forget(self) -> None:
        """Drop all training since the last contribution."""
        self.carry, self._round, self._asked_ahead = Carry(), None, None
        self._start_loaded, self._trained_on = False, set()

    def _held_round(self) -> int | None:
        """Return the round of the outer state; None if the processes of this worker hold different ones."""
        return self._ranks.agreed(self._state.round)

    # --- between rounds -------------------------------------------------------------------------------------------

    def _ask(self) -> Assignment:
        """Ask what to do, or take the answer that came ahead. If the units of the carried work are not held any more,
        the work is dropped."""
        ahead, self._asked_ahead = self._asked_ahead, None
        try:
            self._epoch, asked = (
                ahead.result() if ahead else self._assignments.ask(self._held_round(), self.carry.units)
            )
        except Problem as problem:
            if problem.slug != "units-not-held":
                raise
            log.warning("the carried work is dropped: %s", problem.detail)
            self._forget()
            self._epoch, asked = self._assignments.ask(self._held_round(), [])
        return asked

    def _ask_ahead(self, flight: InFlight) -> tuple[int, Assignment]:
        """Get the next round's assignment before this round's inner steps are done, as all fragments are stepped. Runs
        on a download thread."""
        _ = self._state.digests  # from now on, a flipped bit is noticed
        # If the training goes on until the answer is there, it is unknown on which units: so all of them are named, and
        # those that are not used return to the pool a round later.
        used = first_units(self.assignment.units, self._training.steps.most)
        left = [] if flight.superseded else units_left(self.carry.units + used, flight.consumed)
        return self._assignments.ask(flight.round + 1, left)

    def _check_wanted(self) -> None:
        """Raise Unwanted if the lease ended during the round, or the coordinator said stop, and the round's work is not
        accepted any more."""
        if not self._news:
            return
        run_ended = self._ranks.on_first(self._heartbeat.run_ended.is_set)
        self._heartbeat.run_ended.clear()
        trained, held = self.assignment, self._held_round()
        try:
            self._epoch, asked = self._assignments.ask(trained.round if held is None else held, self.carry.units)
        except Problem as problem:
            if problem.slug != "units-not-held":
                raise
            raise Unwanted(problem.detail) from problem
        if asked.action is Action.RECOVER and self._sync.wait == "never" and not run_ended:
            return  # the round has closed: its units are kept for this worker, and their work goes on as late work
        if not _assigns(asked, trained.round, trained.units):
            raise Unwanted(asked.reason)

    def _prepare(self, asked: Assignment) -> Assignment:
        """Do what the coordinator says until there is a round to train or the run is over. Return that assignment."""
        while asked.action not in (Action.TRAIN, Action.FINISH):
            if asked.action is not Action.WAIT:
                self._carry_model(asked.round)
            self._assignments.prepare(asked)
            asked = self._ask()
        return asked

    def _carry_model(self, to_round: int) -> None:
        """Carry all progress in the model before the state of round `to_round` is loaded; drop it if the run was
        restored from a backup, so that rounds are repeated. Steps since everything was sent are dropped, too, if rounds
        closed meanwhile: the line was cut, and they went another way than the others (measured: docs/log.md)."""
        if to_round <= self.assignment.round:
            self._restart_optimizers(to_round)
        missed, alone = to_round > self.assignment.round + 1, max(self.carry.fresh.values(), default=0)
        if missed and alone and self._sync.wait == "never" and self._behind_since is None:
            log.warning(
                "the run went on to round %d before this worker had the deltas of round %d: its %d inner steps since "
                "are dropped, as they would set the others back",
                *(to_round, self.assignment.round, alone),
            )
            self._training.progress.drop(alone)
            self.carry, self._start_loaded = replace(self.carry, units=[], ahead={}, fresh={}, waited=0), False
            return
        if not all(self._ranks.all(self.carry.is_of_rounds_before(to_round))):
            log.warning("the run was rolled back to round %d: the work of later rounds is dropped", to_round)
            self._forget()
            return
        sent, ahead = replace(self.carry, ahead={}), dict(self.carry.ahead)
        for p in self._trained_on:
            local = self._fragments.gather_from_all(p)
            if not self._fragments.owns(p):
                continue
            trained = self._fragments.pseudo_gradient(p, self._state.theta[p], self.carry.part(p), local)
            carried = sent.part(p)
            ahead[p] = trained if carried is None else trained - carried
        self.carry, self._start_loaded, self._trained_on = replace(self.carry, ahead=ahead), False, set()

    def _restart_optimizers(self, to_round: int) -> None:
        """Start the inner optimizers cold, as a joiner's are: the run has gone back to an earlier state, or has made
        the state of this round again. Their moments are of a dropped state, whose gradients may have been far larger.
        If they took fewer steps on it than a cold optimizer needs to warm up, they stay."""
        steps = self._training.steps
        if to_round >= self.assignment.round - 1 and steps.done <= steps.warmup_steps:
            return
        for optimizer in self._training.optimizers:
            optimizer.state.clear()
        steps.warmup_left = steps.warmup_steps

    # --- snapshots, start and end of the process ------------------------------------------------------------------

    def _save(self, work: Work | RoundStart, *, partial: bool = False) -> Future[None] | None:
        """Start to write the snapshot. `partial`: the worker leaves in the middle of the round."""

        def optimizers() -> list[dict[str, Any]]:
            taken = [local_state(each) for each in self._training.optimizers]
            # They stand still while work is written; at a round's start, the training goes on meanwhile.
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
        """Continue from the last process's snapshot, if there is one. Return the first assignment."""
        found = self._saver.load(self._training.optimizers)
        if found is None:
            self._state.begin_changes()
            self._state.take(self._fragments)
            return self._ask()
        self._assignments.untouched, self._training.steps.warmup_left = False, found.warmup_left
        if isinstance(found.work, Work):
            self._restore_model(found.work)
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
            # Rounds have passed without this worker. If it was in the middle of one, it is unknown which units have
            # been consumed; the little that was not sent is trained again.
            if isinstance(found.work, RoundStart):
                self._forget()
            if not self.carry.units:
                self._exchange.membership.start_over()
        return asked

    def _contribute(self, work: Work, *, partial: bool) -> None:
        """Contribute the saved work. Contributions that were uploaded before are accepted as the same."""

        def in_common() -> Carry:
            first = work.contributions[0]
            return Carry(units=first.units, weight=first.weight, inner_steps=first.inner_steps, loss=first.loss)

        carry = self._ranks.on_first(in_common)
        nothing_new = Assignment(action=Action.TRAIN, reason="resumed", round=work.round)
        round_ = Round(self._exchange, self._training, nothing_new, carry, Durable(), self._ask_ahead)
        self._training.progress.phase("sync")
        try:
            self._reclaim_if_lost(round_, lambda: round_.contribute(work.contributions))
            self._settle(round_)
        except (Resync, WorkLost, RunEnded) as error:
            self._drop_work(round_, error)
        if partial and not self.carry.units:
            self._exchange.membership.start_over()  # if the leave got lost, we still hold the remaining units

    def _restore_model(self, work: Work) -> None:
        """Restore the model as it was when the work was saved, θ − Δ, except for rounding: the optimizers' own points
        belong to it."""
        trained = {each.fragment: each.pseudo_gradient for each in work.contributions}
        for p in range(len(self._state)):
            self._fragments.rebase(p, self._state.theta[p], trained.get(p))
            self._state.release(p)

    def _start_from(self, start: RoundStart) -> None:
        for p, local in enumerate(start.local):
            self._fragments.scatter(p, local)
        self.carry, self._start_loaded, self._trained_on = start.carry, True, set(range(len(start.local)))

    def hand_in(self) -> None:
        """When leaving in the middle of a round, contribute the inner steps that were done. The other units return to
        the pool."""
        if self._round is None:
            return
        changed = [each for each in self._ranks.all(self._training.writes.changed()) if each is not None]
        if changed:
            log.warning(
                "round %d: the inner steps of this round are not contributed: parameters of the model, such as %s, "
                "were changed after the last step (for example by swapping in EMA weights)",
                self._round.assignment.round,
                changed[0],
            )
            return
        unsent = self._round.unsent()
        if all(self._ranks.all(len(unsent) == len(self._state.own))) and not self._sync.streams:
            # in case a fragment does not get through
            self._save(Work(self._round.assignment.round, unsent), partial=True)
        if unsent:
            self._exchange.hand_in(unsent)

    def close(self) -> None:
        """Stop everything that still runs."""
        if self._round is not None and self._round.under_way:
            self._exchange.client.stop.set()  # nothing waits for the answers any more
            self._round.abandon()


def _assigns(asked: Assignment, round_number: int, units: UnitRanges) -> bool:
    """Return True if `asked` assigns `units` of round `round_number`."""
    return asked.action is Action.TRAIN and asked.round == round_number and asked.units == units
