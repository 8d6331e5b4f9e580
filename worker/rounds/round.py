"""One round on one worker: its fragments are sent and merged, each once, and what no mean has is carried on.

    sent      Δ = θ_global − θ_local
    merged    θ_local = θ_global(new) − carry

A round's units: each contribution names those of its round that were trained on so far, and those of the last round
that came after its last contribution. The coordinator consumes what was not consumed yet.
"""

import logging
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from protocol.errors import CodecError
from protocol.messages import Assignment
from worker.rounds.exchange import Exchange
from worker.rounds.flight import Flight
from worker.rounds.schedule import schedule
from worker.rounds.training import Training
from worker.state.work import Carry, Contribution, UnitRanges, Work, count, units_left

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Durable:
    """What is durable before a contribution is uploaded, so that a killed worker can go on.

    start    the writing of what the round starts from, for every contribution; None where that is not saved
    save     begins to write the round's work, for the last contribution; None where that is not saved
    """

    start: Future[None] | None = None
    save: Callable[[Work], Future[None] | None] | None = None


class Round:
    """One round, from the model that holds θ_global − carry. `ask_ahead` is called once all fragments are stepped, if
    the training goes on meanwhile.

    Of several processes, each contributes to the fragments that it owns. All of them send and merge all fragments, in
    the same order: those of others by giving what they hold of the parameters, and taking what they hold of new ones.

    carry       progress that no mean has, up to now; of fragments, of those that this process owns
    ended       the inner steps are done
    work        all contributions of this process, where they were made at once, while the training stood still
    trained_on  once it is settled: the fragments that have been trained on since they were merged
    """

    def __init__(
        self,
        exchange: Exchange,
        training: Training,
        assignment: Assignment,
        carry: Carry,
        durable: Durable,
        ask_ahead: Callable[[Flight], Any],
    ) -> None:
        self._exchange, self._state, self._sync = exchange, exchange.state, exchange.spec.sync
        self._fragments, self._steps, self._progress = training.fragments, training.steps, training.progress
        self._ranks, self._protection, self._writes = training.ranks, training.protection, training.writes
        self._save, self.assignment, self.carry = durable.save, assignment, carry
        last = assignment.step + assignment.schedule_steps == exchange.spec.total_inner_steps
        self._schedule = schedule(
            self._sync, len(self._state), assignment.inner_steps, last=last, first=not carry.units
        )
        # Units each fragment was trained on since it was sent, those of this round not counted.
        self._fresh = {p: carry.fresh.get(p, 0) for p in range(len(self._state))}
        # Of several processes none knows when the others' fragments are stepped, so that they ask at the round's end.
        arrived = ask_ahead if self._schedule.overlaps and self._ranks.size == 1 else None
        self._flight = Flight(exchange, assignment.round, durable.start, arrived)
        self._sent: set[int] = set()
        self._merged: set[int] = set()
        self._local: dict[int, Tensor] = {}  # the parameters as sent, of fragments that are trained on meanwhile
        self._loss = carry.loss
        self.work: list[Contribution] = []
        self.trained_on: set[int] = set()
        self.ended = False

    # --- sent -----------------------------------------------------------------------------------------------------

    def send_due(self) -> None:
        """Send the pseudo-gradients that are due after this inner step, as they are now: Δ = θ_global − θ_local."""
        fragments = self._due(self._schedule.sent, self._sent)
        if not fragments:
            return
        self._fragments.check()
        self._writes.look_back()
        self._progress.phase("gather")
        self._note_loss()
        waited_for = [p for p in fragments if self._schedule.merged[p] <= self._step]
        if waited_for:
            self._send_standing_still(waited_for)
        if len(waited_for) < len(fragments):
            self._send_beside_training([p for p in fragments if p not in waited_for])

    def _send_beside_training(self, fragments: list[int]) -> None:
        """Only copy the parameters here, all of them before other threads begin with the rest and want the cores as
        well."""
        self._local |= {p: self._fragments.gather(p) for p in fragments}
        if self._protection is not None:
            self._protection.count(fragments)
        for p in fragments:
            if self._fragments.owns(p):
                self._flight.send(p, self._leaving_alone(self._contribution(p, self._local[p])))
            self._note_sent(p)
        self._progress.phase("train")

    def _send_standing_still(self, fragments: list[int]) -> None:
        """Make the contributions here, one by one, while those before them travel. The last upload waits until the work
        is durable: so the round cannot close with this work in it, and only this process know what came of it."""
        self._check_all_finite()
        if self._protection is not None:
            self._send_protected(fragments)
            return
        last: Contribution | None = None
        for p in fragments:
            local = self._fragments.gather_from_all(p)
            if self._fragments.owns(p):
                if last is not None:
                    self._send_made(last)
                last = self._contribution(p, local)()
                if len(fragments) == len(self._state):
                    self.work.append(last)
            self._note_sent(p)
        if self._save is not None and len(fragments) == len(self._state):
            self._flight.saved = self._durable_everywhere(self._save(Work(self.assignment.round, list(self.work))))
        if last is not None:
            self._send_made(last)

    def _send_protected(self, fragments: list[int]) -> None:
        """Make all contributions before one is sent: what is sent together is clipped together. All uploads wait until
        the work is durable, so that none is made again with other noise after a kill."""
        made = self._made(fragments)
        for p in fragments:
            self._note_sent(p)
        if len(fragments) == len(self._state):
            self.work += made
            if self._save is not None:
                self._flight.saved = self._durable_everywhere(self._save(Work(self.assignment.round, list(made))))
        for each in made:
            self._send_made(each)

    def _leaving_alone(self, make: Callable[[], Contribution]) -> Callable[[], Contribution]:
        """Return `make`, of a contribution that leaves by itself and is counted already."""
        protection = self._protection
        return make if protection is None else lambda: protection.alone(make())

    def _made(self, fragments: list[int]) -> list[Contribution]:
        """Return this process's contributions to the fragments, which leave together, as they are now."""
        made = []
        for p in fragments:
            local = self._fragments.gather_from_all(p)
            if self._fragments.owns(p):
                made.append(self._contribution(p, local)())
        return made if self._protection is None else self._protection.together(made, fragments)

    def _send_made(self, contribution: Contribution) -> None:
        self._progress.phase("sync")  # those that travel are a part of it
        self._flight.send_made(contribution)

    def _durable_everywhere(self, saved: Future[None] | None) -> Future[None] | None:
        """Wait, if there are other processes, until what all of them save is durable: of these snapshots one alone is
        worth nothing."""
        if self._ranks.size > 1 and saved is not None:
            self._ranks.together(saved.result)
        return saved

    def _note_sent(self, p: int) -> None:
        self._sent.add(p)
        self._fresh[p] = -count(self._used)

    def unsent(self) -> list[Contribution]:
        """Return this process's contributions to the fragments that are not sent yet, as they are now."""
        fragments = [p for p in range(len(self._state)) if p not in self._sent]
        if not fragments or not (self._steps.units_used or self.carry.units):
            return []
        self._fragments.check()
        self._writes.look_back()
        self.note_speed()
        self._note_loss()
        self._check_all_finite()
        return self._made(fragments)

    @property
    def has_all_work(self) -> bool:
        """True if all of the round's contributions of this process are in `work`."""
        return len(self.work) == len(self._state.own)

    def note_speed(self) -> None:
        """Tell how fast the inner steps were; they are done."""
        steps = self._steps.done
        if steps:
            self._progress.end_inner_steps(steps, steps * self._exchange.spec.unit_tokens)

    def _contribution(self, p: int, local: Tensor | None = None) -> Callable[[], Contribution]:
        """Return what makes the contribution to fragment p, of the parameters `local`, or those of the model."""
        carry, round_number, used = self.carry, self.assignment.round, self._used
        named, fresh = carry.units + used, self._fresh[p] + count(used)
        # At most what the coordinator lets one round weigh.
        weight = min(fresh or carry.weight or 1, max(count(named), self.assignment.inner_steps))
        skipped = count(used) - self._steps.done  # by a GradScaler
        inner_steps = carry.inner_steps + max(fresh - skipped, 0)
        loss, gathered = self._loss, self._fragments.mark()

        def make() -> Contribution:
            delta = self._fragments.pseudo_gradient(p, self._state.theta[p], carry.delta(p), local, gathered)
            if not self._state.is_intact(p):
                # Nobody knows what it was taken against; the coordinator will refuse it for its base, and tell of it.
                log.error("round %d: the memory of fragment %d's outer state changed by itself", round_number, p)
                delta.zero_()
            norm = float(torch.linalg.vector_norm(delta))
            self._check_finite(norm, loss)
            return Contribution(round_number, p, named, weight, inner_steps, loss, norm, delta, carry.late.get(p))

        return make

    @property
    def _step(self) -> int:
        """The inner step after which the round is; where there were fewer than H, all is due after the last one."""
        return self.assignment.inner_steps if self.ended else self._steps.done

    @property
    def next_sent(self) -> int | None:
        """The inner step after which the next fragment is to be sent; None where all are."""
        return min((due for p, due in enumerate(self._schedule.sent) if p not in self._sent), default=None)

    def _due(self, steps: list[int], done: set[int]) -> list[int]:
        return [p for p, due in enumerate(steps) if due <= self._step and p not in done]

    @property
    def _used(self) -> UnitRanges:
        """The units of this round that were used so far."""
        return self._steps.units_used

    def _note_loss(self) -> None:
        """Note the mean loss of this round so far; before its first inner step, that of what is carried."""
        self._loss = self._progress.mean_loss() if self._steps.done else self.carry.loss

    def _check_all_finite(self) -> None:
        """Raise CodecError where any part of the model is not finite, before any of it is sent."""
        self._check_finite(self._fragments.norm(), self._loss)

    def _check_finite(self, norm: float, loss: float | None) -> None:
        if not (math.isfinite(norm) and (loss is None or math.isfinite(loss))):
            raise CodecError(
                f"round {self.assignment.round}: the training has diverged: "
                f"loss {'unknown' if loss is None else loss}, norm {norm}; "
                "nothing of that was sent; lower the learning rate or clip gradients, in a new run"
            )

    # --- merged ---------------------------------------------------------------------------------------------------

    def merge_due(self) -> None:
        """Wait for the outer steps of the fragments whose merge is due, and go on from the new global parameters:
        θ_local = θ_global − carry. Raises Resync, WorkLost, RunEnded and Stopped."""
        for p in self._due(self._schedule.merged, self._merged):
            self._merge(p)
            self._progress.phase("sync" if self.ended else "train")

    def _merge(self, p: int) -> None:
        self._progress.phase("sync")
        self._ranks.by(self._fragments.owner(p), lambda: self._land(p))
        ahead = self._ahead(p, self._local.pop(p, None), self.carry.delta(p))
        if self._fragments.owns(p):
            self.carry = self.carry.with_ahead(p, ahead)
        self._fragments.rebase(p, self._state.theta[p], self.carry.delta(p))
        self._merged.add(p)

    def _land(self, p: int) -> None:
        left = self._flight.land(p)
        self.carry = self.carry.lacking(self._flight.contributions.pop(p), left)

    def _ahead(self, p: int, local: Tensor | None, carried: Tensor | None) -> Tensor | None:
        """Return what is kept, float32[n] in host memory, of the progress of fragment p that neither its new mean has
        nor `carried`. `local`: the parameters as they were sent, if training went on since."""
        alpha, start = self._sync.alpha, self._state.theta[p]
        if alpha == "carry":
            return None if local is None else self._fragments.progress_since(p, local)
        if carried is not None:  # it is in the local parameters as well, and must not count twice
            start = start - carried
        now = self._fragments.in_host_memory(self._fragments.gather(p))  # of others' fragments, nothing
        return (start - now) * alpha  # θ_local becomes α·θ_local + (1 − α)·start

    def contribute(self, work: list[Contribution]) -> None:
        """Send and merge all of the round's contributions, which are made already: `work` those of this process. Raises
        as `merge_due` does."""
        self.work, self._flight = work, Flight(self._exchange, self.assignment.round)
        for contribution in work:
            self._flight.send_made(contribution)
        for p in range(len(self._state)):
            self._merge(p)

    # --- over -----------------------------------------------------------------------------------------------------

    def settle(self) -> tuple[Carry, Future[Any] | None]:
        """End the round, all fragments of which are merged; return what is carried on, and what `ask_ahead` returns."""
        self._flight.end()
        self._state.round = self._flight.round + 1  # also in a process that owns no fragment
        ends = self._ranks.all((self._flight.superseded, self._flight.consumed, self._flight.inner_steps))
        if any(superseded for superseded, _, _ in ends):
            return self._begin_anew(), self._flight.arrival
        used, consumed = self._used, max(consumed for _, consumed, _ in ends)
        self._note_loss()
        self.trained_on = {p for p, due in enumerate(self._schedule.merged) if due < self._steps.done}
        carry = replace(
            self.carry,
            units=units_left(self.carry.units + used, consumed),
            weight=count(used) or self.carry.weight,
            inner_steps=0 if consumed else max(inner_steps for _, _, inner_steps in ends),
            loss=self._loss,
            fresh={p: fresh + count(used) for p, fresh in self._fresh.items()},
        )
        if carry.late:
            log.warning(
                "round %d closed without some of this worker's work: it goes into the next", self.assignment.round
            )
        return carry, self._flight.arrival

    def _begin_anew(self) -> Carry:
        """What an earlier process of this worker has contributed stands beside what this one has: some fragments are
        ahead by other units than others. So all of them begin at the global parameters, and nothing is carried."""
        for p in range(len(self._state)):
            self._fragments.rebase(p, self._state.theta[p], None)
        return Carry()

    @property
    def under_way(self) -> bool:
        """True if anything was sent."""
        return self._flight.under_way

    @property
    def arrival(self) -> Future[Any] | None:
        """What `ask_ahead` returns; None before it was called."""
        return self._flight.arrival

    def abandon(self) -> None:
        """Give up what is under way."""
        self._flight.abandon()
