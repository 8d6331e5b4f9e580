"""One round on one worker: each fragment is sent once and merged once; progress that is in no mean is carried on.

sent      Δ = θ_global − θ_local
merged    θ_local = θ_global(new) − carry
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from protocol.errors import CodecError
from protocol.messages import Assignment
from worker.process import give_back_free_memory
from worker.rounds.exchange import Exchange
from worker.rounds.in_flight import InFlight
from worker.rounds.schedule import ON_ARRIVAL, schedule
from worker.rounds.training import Training
from worker.state.work import Carry, Contribution, UnitRanges, Work, count, units_left

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Durable:
    """What must be durable before an upload starts, so that a killed worker can continue.

    start    the writing of the round's start, awaited by every upload; None if it is not saved
    save     starts to write the round's work, awaited by the last upload; None if it is not saved
    """

    start: Future[None] | None = None
    save: Callable[[Work], Future[None] | None] | None = None


class Round:
    """One round. It starts with θ_global − carry in the model. `ask_ahead` is called once all fragments are stepped, if
    the training overlaps with them.

    Of several processes, each contributes to the fragments that it owns. All of them send and merge all fragments, in
    the same order: for another process's fragment, they give it their part of the parameters, and take their part of
    the new ones.

    `stale`: if this worker is behind, how many rounds have closed since it began the work that it carries; otherwise 0.

        carry       progress that is in no mean so far, of the fragments that this process owns
        ended       its own inner steps are done
        over        all of its inner steps are done, including those until its deltas have arrived
        work        all contributions of this process, if they were made together while the training stood still
        trained_on  once settled: the fragments that have been trained on since they were merged
        behind      once settled: the round closed before this worker had done its inner steps
    """

    def __init__(
        self,
        exchange: Exchange,
        training: Training,
        assignment: Assignment,
        carry: Carry,
        durable: Durable,
        ask_ahead: Callable[[InFlight], Any],
        *,
        stale: int = 0,
    ) -> None:
        self._exchange, self._state, self._sync = exchange, exchange.state, exchange.spec.sync
        self._fragments, self._steps, self._progress = training.fragments, training.steps, training.progress
        self._ranks, self._writes = training.ranks, training.writes
        self._save, self.assignment, self.carry = durable.save, assignment, carry
        last = assignment.step + assignment.schedule_steps == exchange.spec.total_inner_steps
        self._stale = stale if carry.units and not last else 0
        self._schedule = schedule(
            *(self._sync, len(self._state), self._steps.own),
            last=last,
            first=not carry.units,
            at_once=self._stale > 0 or self._steps.ready,
        )
        # Units that each fragment was trained on since it was sent, without those of this round.
        self._fresh = {p: carry.fresh.get(p, 0) for p in range(len(self._state))}
        # With several processes, none knows when the others' fragments are stepped: they ask at the end of the round. A
        # worker that is behind does so too, because the next round may be over by then.
        asks_ahead = self._schedule.overlaps and self._ranks.size == 1 and not self._stale
        arrived = ask_ahead if asks_ahead else None
        self._in_flight = InFlight(exchange, assignment.round, durable.start, arrived, lambda: self._steps.done)
        self._sent: set[int] = set()
        self._merged: set[int] = set()
        self._local: dict[int, Tensor] = {}  # from which fragments are trained on while in flight
        self._loss = carry.loss
        self.work: list[Contribution] = []
        self.trained_on: set[int] = set()
        self.ended = self.over = self.behind = False
        self._landed_first = False  # all fragments were stepped before this round's inner steps were done

    # --- sending --------------------------------------------------------------------------------------------------

    def send_due(self) -> None:
        """Send the fragments that are due after this inner step: Δ = θ_global − θ_local, as it is now."""
        fragments = self._due(self._schedule.sent, self._sent)
        if not fragments:
            return
        self._fragments.check()
        self._writes.check_pending()
        self._progress.phase("gather")
        give_back_free_memory()
        self._note_loss()
        waited_for = [p for p in fragments if self._schedule.merged[p] <= self._step]
        if waited_for:
            self._send_standing_still(waited_for)
        if len(waited_for) < len(fragments):
            self._send_beside_training([p for p in fragments if p not in waited_for])

    def _send_beside_training(self, fragments: list[int]) -> None:
        """Only copy the parameters here, all of them before other threads take the cores for the rest. They go into
        host memory, as the training needs the GPU's. If it goes on until the deltas arrive, it does so from what this
        worker's own update alone would make of the global parameters: most of the outer step, before the deltas."""
        sent = {p: self._fragments.in_host_memory(self._fragments.gather(p)) for p in fragments}
        goes_on = self._schedule.on_arrival
        for p in fragments:
            self._local[p] = self._state.alone(p, sent[p]) if goes_on and self._fragments.owns(p) else sent[p]
            if self._fragments.owns(p):
                self._in_flight.send(p, self._contribution(p, partial(sent.pop, p)))  # which is the last to need it
            self._note_sent(p)
        for p in fragments if goes_on else ():
            if self._fragments.owns(p):
                self._local[p] = self._fragments.rounded(p, self._local[p])
            self._fragments.rebase(p, self._local[p], None)
        self._progress.phase("train")

    def _send_standing_still(self, fragments: list[int]) -> None:
        """Make the contributions here, one by one, while the earlier ones are uploaded. The last upload waits until the
        work is durable: so the round cannot close with work in it that only this process knows."""
        self._check_all_finite()
        is_whole = len(fragments) == len(self._state)
        last: Contribution | None = None
        left = sum(map(self._fragments.owns, fragments))
        for made in self._made(fragments):
            left -= 1
            if left:
                self._send_made(made)
            else:
                last = made
            if is_whole:
                self.work.append(made)
        for p in fragments:
            self._note_sent(p)
        if self._save is not None and is_whole:
            self._in_flight.saved = self._durable_everywhere(self._save(Work(self.assignment.round, list(self.work))))
        if last is not None:
            self._send_made(last)

    def _made(self, fragments: Sequence[int]) -> Iterator[Contribution]:
        """Make this process's contributions to the fragments from the model as it is now, one by one."""
        for p in fragments:
            local = self._fragments.gather_from_all(p)
            if self._fragments.owns(p):
                yield self._contribution(p, lambda: local)()  # noqa: B023, called at once

    def _send_made(self, contribution: Contribution) -> None:
        self._progress.phase("sync")  # the uploads that run meanwhile are part of it
        self._in_flight.send_made(contribution)

    def _durable_everywhere(self, saved: Future[None] | None) -> Future[None] | None:
        """With several processes, wait until all of them have saved: one process's snapshot alone is useless."""
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
        self._writes.check_pending()
        self.note_speed()
        self._note_loss()
        self._check_all_finite()
        return list(self._made(fragments))

    @property
    def has_all_work(self) -> bool:
        """True if all of the round's contributions of this process are in `work`."""
        return len(self.work) == len(self._state.own)

    def end_inner_steps(self) -> None:
        """Note that the round's own inner steps are done."""
        self._landed_first = self._in_flight.under_way and self._in_flight.landed and not self._steps.ready
        self.note_speed()

    def note_speed(self) -> None:
        """Report the speed of the inner steps, which are done."""
        steps = self._steps.done
        if steps:
            self._progress.end_inner_steps(steps, steps * self._exchange.spec.unit_tokens)

    def _contribution(self, p: int, local: Callable[[], Tensor | None]) -> Callable[[], Contribution]:
        """Return a function that makes the contribution to fragment p from the parameters that `local` returns. None:
        from those of the model."""
        carry, round_number, used = self.carry, self.assignment.round, self._used
        named, fresh = carry.units + used, self._fresh[p] + count(used)
        # at most what the coordinator accepts as the weight of one round
        weight = min(fresh or carry.weight or 1, max(count(named), self.assignment.inner_steps))
        weight = max(weight // (1 + self._stale), 1)  # as FedAsync (arXiv 1903.03934) with a = 1
        skipped = count(used) - self._steps.done  # by a GradScaler
        inner_steps = carry.inner_steps + max(fresh - skipped, 0)
        loss, gathered = self._loss, self._fragments.mark()

        def make() -> Contribution:
            room = self._state.room_for_pseudo_gradient(p)
            made = self._fragments.pseudo_gradient(p, self._state.theta[p], carry.part(p), local(), gathered, room)
            norm = float(torch.linalg.vector_norm(made))
            if not self._state.is_intact(p):
                # The base of this pseudo-gradient is unknown. The coordinator rejects it by its base, and reports that.
                log.error("round %d: the memory of fragment %d's outer state has changed unexpectedly", round_number, p)
                norm = float(torch.linalg.vector_norm(made.zero_()))
            self._state.release_pseudo_gradient(p)
            self._check_finite(norm, loss)
            return Contribution(round_number, p, named, weight, inner_steps, loss, norm, made, carry.late.get(p))

        return make

    def _trains_on(self) -> bool:
        """Return True if the inner steps go on beyond the round's own: its deltas have not all arrived. All processes
        call it at once."""
        if not (self._schedule.on_arrival and self._steps.may_go_on):
            return False
        return not all(self._ranks.all(self._in_flight.landed))

    @property
    def _step(self) -> int:
        """The current inner step; H once the round has ended, even if there were fewer: then everything is due, except
        what is merged on arrival."""
        if self.over:
            return ON_ARRIVAL
        return self._steps.own if self.ended else self._steps.done

    @property
    def next_sent(self) -> int | None:
        """The inner step after which the next fragment is sent; None if all are sent."""
        return min((due for p, due in enumerate(self._schedule.sent) if p not in self._sent), default=None)

    def _due(self, steps: list[int], done: set[int]) -> list[int]:
        return [p for p, due in enumerate(steps) if due <= self._step and p not in done]

    @property
    def _used(self) -> UnitRanges:
        """The units of this round that were used so far."""
        return self._steps.units_used

    def _note_loss(self) -> None:
        """Note the mean loss of this round so far; before its first inner step, that of the carried work."""
        self._loss = self._progress.mean_loss() if self._steps.done else self.carry.loss

    def _check_all_finite(self) -> None:
        """Raise CodecError if any part of the model is not finite, before any of it is sent."""
        self._check_finite(self._fragments.norm(), self._loss)

    def _check_finite(self, norm: float, loss: float | None) -> None:
        if not (math.isfinite(norm) and (loss is None or math.isfinite(loss))):
            raise CodecError(
                f"round {self.assignment.round}: the training has diverged: loss "
                f"{'unknown' if loss is None else loss}, norm {norm}; nothing of this was sent; lower the learning "
                "rate or clip gradients, in a new run"
            )

    # --- merging --------------------------------------------------------------------------------------------------

    def merge_due(self) -> None:
        """Merge the fragments that are due: wait for their outer steps, and continue from the new global parameters,
        θ_local = θ_global − carry. Raises Resync, WorkLost, RunEnded and Stopped."""
        self.over = self.ended and not self._trains_on()
        for p in self._due(self._schedule.merged, self._merged):
            self._merge(p)
            self._progress.phase("sync" if self.ended else "train")

    def _merge(self, p: int) -> None:
        self._progress.phase("sync")
        self._ranks.on(self._fragments.owner(p), lambda: self._await_merge(p))
        ahead = self._ahead(p, self._local.pop(p, None), self.carry.part(p))
        if self._fragments.owns(p):
            self.carry = self.carry.with_ahead(p, ahead)
        self._fragments.rebase(p, self._state.theta[p], self.carry.part(p))
        self._state.release(p)
        self._merged.add(p)

    def _await_merge(self, p: int) -> None:
        left = self._in_flight.wait(p)
        self.carry = self.carry.with_residual(self._in_flight.contributions.pop(p), left)

    def _ahead(self, p: int, local: Tensor | None, carried: Tensor | None) -> Tensor | None:
        """Return the progress on fragment p to keep, float32[n] in host memory, that is neither in its new mean nor in
        `carried`. `local`: the parameters from which the training went on, if it did."""
        alpha, start = self._sync.alpha, self._state.theta[p]
        if alpha == "carry":
            return None if local is None else self._fragments.progress_since(p, local)
        if carried is not None:  # it is in the local parameters as well, and must not count twice
            start = start - carried
        now = self._fragments.in_host_memory(self._fragments.gather(p))  # empty for other processes' fragments
        return (start - now) * alpha  # θ_local becomes α·θ_local + (1 − α)·start

    def contribute(self, work: list[Contribution]) -> None:
        """Send and merge all of the round's contributions, which are made already: `work` has this process's. Raises
        what `merge_due` raises."""
        self.work, self._in_flight = work, InFlight(self._exchange, self.assignment.round)
        for contribution in work:
            self._in_flight.send_made(contribution)
        for p in range(len(self._state)):
            self._merge(p)

    # --- settling -------------------------------------------------------------------------------------------------

    def settle(self) -> tuple[Carry, Future[Any] | None]:
        """End the round once all fragments are merged. Return what is carried on, and the result of `ask_ahead`."""
        self._in_flight.end()
        self._state.reach(self._in_flight.round + 1)  # also in a process that owns no fragment
        flight = self._in_flight
        is_behind = self._schedule.on_arrival and (bool(self.carry.late) or self._landed_first)
        mine = flight.superseded, flight.consumed, flight.inner_steps, is_behind, *flight.waited_between
        superseded, consumed, inner_steps, behind, uploaded, published = zip(*self._ranks.all(mine), strict=True)
        if any(superseded):
            return self._start_over(), flight.arrival
        used, self.behind = self._used, any(behind)
        self._note_loss()
        self.trained_on = {p for p, due in enumerate(self._schedule.merged) if due < self._steps.done}
        carry = replace(
            self.carry,
            units=units_left(self.carry.units + used, max(consumed)),
            weight=count(used) or self.carry.weight,
            inner_steps=0 if max(consumed) else max(inner_steps),
            loss=self._loss,
            fresh={p: fresh + count(used) for p, fresh in self._fresh.items()},
            waited=max(max(published) - max(uploaded), 0),
        )
        if carry.late:
            log.warning(
                "round %d closed without some of this worker's work, which is carried into the next round",
                self.assignment.round,
            )
        return carry, flight.arrival

    def _start_over(self) -> Carry:
        """Let all fragments start from the global parameters, with nothing carried: contributions of an earlier process
        of this worker stand next to this one's, so the fragments contain different units."""
        for p in range(len(self._state)):
            self._fragments.rebase(p, self._state.theta[p], None)
        return Carry()

    @property
    def under_way(self) -> bool:
        """True if anything was sent."""
        return self._in_flight.under_way

    @property
    def arrival(self) -> Future[Any] | None:
        """The result of `ask_ahead`; None before it was called."""
        return self._in_flight.arrival

    def abandon(self) -> None:
        """Give up everything in flight."""
        self._in_flight.abandon()
