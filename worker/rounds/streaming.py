"""Rounds whose training goes on while fragments travel: Streaming DiLoCo (arXiv 2501.18512), eager updates
(2502.12996).

Each fragment is sent after an inner step of its own and merged some inner steps later (schedule.py). Meanwhile the
fragment is contributed, averaged, fetched, and its outer state stepped, on other threads. At the merge the parameters
become the new global ones and, on top, the progress that was made since the fragment was sent: nothing of the new mean
has that, so it is carried and part of the next contribution, as late work is.

    sent      Δ = θ_global − θ_local;  snapshot = θ_local
    merged    ahead = snapshot − θ_local;  θ_local = θ_global(new) − ahead;  the next Δ begins with `ahead`

A round's units: each contribution names those of its round that were trained on so far, and those of the last round
that came after its last contribution. The coordinator consumes what was not consumed yet.

The compute waits only where a merge is due and its delta is not there; that is the stage `sync`.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from protocol.messages import Assignment
from worker.rounds.rounds import LATE, Rounds, Save
from worker.rounds.schedule import Schedule, schedule
from worker.rounds.sync import Flight
from worker.state.work import Midway, Missed, Piece, Superseded, UnitRanges, Work, count, first_units, last_units

log = logging.getLogger(__name__)


class StreamedRounds(Rounds):
    """As `Rounds`; but what is in `carry` of a fragment is from its last merge on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        fragments = len(self._state)
        self._flight: Flight | None = None
        self._due = Schedule([], [])
        # Units each fragment was trained on since it was sent last, those of this round not counted.
        self._fresh = [0] * fragments
        self._sent: set[int] = set()  # this round's, as is _merged
        self._snapshots: dict[int, Tensor] = {}  # of those that were sent and not merged yet: the parameters as sent
        self._merged: set[int] = set()
        self._saved: Future[None] | None = None  # the writing of the snapshot that this round begins with
        self._arrival: Future[tuple[int, Assignment]] | None = None  # the answer that `_ask_ahead` got
        self._ending = False  # the inner steps of this round are done

    # --- one round ------------------------------------------------------------------------------------------------

    def _begin(self, assignment: Assignment) -> None:
        super()._begin(assignment)
        self._stands = False
        if not self.training:
            return
        last = assignment.round + 1 == self._spec.sync.rounds
        steps, first = assignment.inner_steps, not self.carry.units
        self._due = schedule(self._spec.sync, len(self._state), steps, last=last, first=first)
        self._sent, self._merged, self._ending = set(), set(), False
        self._flight = Flight(self._sync, assignment.round, self._saved, self._ask_ahead)
        self._move(0)

    def after_step(self) -> None:
        with self._or_dropped(self.assignment.round):
            self._move(self._steps.done)
            return
        self._drop()
        self.begin_next()

    def _move(self, step: int) -> None:
        """Send and merge what is due after inner step `step`. First send: merging may have to wait."""
        self._send([p for p, due in enumerate(self._due.sent) if due == step])
        for p, due in enumerate(self._due.merged):
            if due == step:
                self._merge(p)

    def end(self, save: Save) -> None:
        round_number, ended, self._ending = self.assignment.round, False, True
        with self._or_dropped(round_number):
            fragments = range(len(self._state))
            self._send([p for p in fragments if p not in self._sent])  # there were fewer than H steps
            for p in fragments:
                if p not in self._merged:
                    self._merge(p)
            ended = True
        if ended:
            self._settle()
            self._progress.end_round(round_number, self._membership.epoch)
            local = [self._fragments.in_host_memory(self._fragments.gather(p)) for p in range(len(self._state))]
            self._saved = save(Midway(round_number + 1, local, self.carry, list(self._fresh)))
        else:
            self._drop()
        self.begin_next()

    def _send(self, fragments: Sequence[int]) -> None:
        """Only the parameters are copied here, all of them before other threads begin with the rest and want the cores
        as well."""
        if not fragments:
            return
        self._progress.phase("gather")
        assert self._flight is not None
        gathered = [self._fragments.gather(p) for p in fragments]
        for p, local in zip(fragments, gathered, strict=True):
            self._flight.send(p, partial(self._make_when_saved, self._maker(p, local), self._saved))
            self._sent.add(p)
            self._fresh[p] = -count(self._used)
            if self._due.merged[p] > self._steps.done:
                self._snapshots[p] = local
        self._progress.phase("train")

    @staticmethod
    def _make_when_saved(make: Callable[[], Piece], saved: Future[None] | None) -> Piece:
        piece = make()
        if saved is not None:
            saved.result()
        return piece

    def _maker(self, p: int, local: Tensor) -> Callable[[], Piece]:
        """Makes what is to be contributed to fragment p, whose parameters are `local` now."""
        carry, round_number, gathered = self.carry, self.assignment.round, self._fragments.side_stream.mark()
        named, fresh = carry.units + self._used, self._fresh[p] + count(self._used)
        # At most what the coordinator lets one round weigh.
        weight = min(fresh, max(count(named), self.assignment.inner_steps)) or carry.weight or 1
        mean_loss = self._progress.mean_loss()
        loss = carry.loss if mean_loss is None else mean_loss

        def make() -> Piece:
            with self._fragments.side_stream.beside(gathered):
                delta = self._fragments.pseudo_gradient(p, self._state.theta[p], carry.delta(p), local)
                delta = self._fragments.in_host_memory(delta)
            norm = float(torch.linalg.vector_norm(delta))
            self._check_finite(loss, norm)
            delta = self._sound(p, delta)
            return Piece(round_number, p, named, weight, fresh, loss, norm, delta, carry.late.get(p))

        return make

    @property
    def _used(self) -> UnitRanges:
        """The units of this round that the parameters have seen."""
        # Where a GradScaler skipped every step, the units are spent all the same.
        return self._steps.units_used or (self.assignment.units if self._ending else [])

    def _merge(self, p: int) -> None:
        self._progress.phase("sync")
        assert self._flight is not None
        left = self._flight.land(p)
        piece, ahead = self._flight.pieces.pop(p), self._ahead(p)
        if isinstance(left, Superseded):
            ahead, self._fresh[p] = None, -count(self._used)
        self.carry = self.carry.merged(
            p,
            late=piece.missed(left) if isinstance(left, Missed) else None,
            unsent=left if isinstance(left, Tensor) else None,
            ahead=ahead,
        )
        self._fragments.rebase(p, self._state.theta[p], self.carry.delta(p))
        self._merged.add(p)
        self._progress.phase("train")

    def _ahead(self, p: int) -> Tensor | None:
        """Of the progress since fragment p was sent, what is kept, float32[n], host memory."""
        snapshot, alpha = self._snapshots.pop(p, None), self._spec.sync.alpha
        if snapshot is None:
            return None
        if alpha == "carry":
            return self._fragments.in_host_memory(self._fragments.progress_since(p, snapshot))
        local = self._fragments.in_host_memory(self._fragments.gather(p))
        return (self._state.theta[p] - local) * alpha  # θ_local becomes α·θ_local + (1 − α)·θ_global

    def _settle(self) -> None:
        """All fragments are merged: the round is over for this worker."""
        assert self._flight is not None
        self._flight.end()
        self._arrival = self._flight.arrival
        steps, used = self._steps.done, self._used
        self._fresh = [fresh + count(used) for fresh in self._fresh]
        units = self._not_consumed(used, self._flight.accepted)
        loss = self._progress.end_inner_steps(steps, steps * self._spec.unit_tokens)
        self.carry = replace(self.carry, units=units, weight=count(used), loss=loss)
        self.training, self._stands, self._flight = False, True, None
        if self.carry.late:
            log.warning(LATE, self.assignment.round)

    def _not_consumed(self, used: UnitRanges, accepted: int) -> UnitRanges:
        named = self.carry.units + used
        return last_units(named, count(named) - accepted)

    # --- between rounds -------------------------------------------------------------------------------------------

    def _ask_ahead(self, flight: Flight) -> tuple[int, Assignment]:
        """All fragments are stepped, so the next round's assignment can be had before this one's inner steps are done:
        on a thread of the flight. With the epoch of the membership that asked."""
        _ = self._state.digests  # from now on, a flipped bit is noticed
        assignment, epoch = self.assignment, self._membership.epoch
        used = first_units(assignment.units, assignment.inner_steps)
        return epoch, self._question(flight.round + 1, self._not_consumed(used, flight.accepted))

    def begin_next(self) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is None:
            super().begin_next()
            return
        asked = self._without_lost_work(lambda: self._arrived(arrival))
        while not self._follow(asked):
            asked = self._ask()

    def _arrived(self, arrival: Future[tuple[int, Assignment]]) -> Assignment:
        self._epoch, asked = arrival.result()
        return asked

    def _ask(self) -> Assignment:
        if self._flight is None or self._state.round is not None:
            return super()._ask()
        self._epoch = self._membership.epoch
        return self._without_lost_work(lambda: self._question(self.assignment.round, self.carry.units))

    def _fall_behind(self) -> None:
        # Which of the units have been consumed is not known any more; so the little that was not sent is trained again.
        self._drop()
        self._membership.start_over()

    def _take_back(self) -> None:
        if not self._stands:
            return
        sent = replace(self.carry, ahead={})
        ahead: dict[int, Tensor] = {}
        for p in range(len(self._state)):
            delta, carried = self._pseudo_gradient(p, self.carry), sent.delta(p)
            ahead[p] = delta if carried is None else delta - carried
        self.carry, self._stands = replace(self.carry, ahead=ahead), False

    def _drop(self) -> None:
        super()._drop()
        flight, self._flight, self._arrival, self._stands = self._flight, None, None, False
        self._fresh = [0] * len(self._state)
        self._snapshots.clear()
        if flight is not None:
            flight.abandon()

    # --- the beginning and the end of the process -----------------------------------------------------------------

    def resume(self, saved: Work | Midway, *, partial: bool) -> None:
        assert isinstance(saved, Midway), "the spec says how a run is saved, and never changes"
        self.carry, self._fresh, self._stands = saved.carry, list(saved.fresh), True
        for p, local in enumerate(saved.local):
            self._fragments.scatter(p, local)

    def hand_in(self, save: Save) -> None:
        if not self.training or not (self._steps.units_used or self.carry.units):
            return
        unsent = [p for p in range(len(self._state)) if p not in self._sent]
        self._sync.hand_in([self._maker(p, self._fragments.gather(p))() for p in unsent])

    def close(self) -> None:
        if self._flight is not None:
            self._client.stop.set()  # nobody waits for what comes back any more
            self._flight.abandon()
