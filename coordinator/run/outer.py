"""The coordinator's own outer state in memory: the state of each fragment, and what is known about its files.

It is changed only by methods of `OuterState`. `sync/outer_state.py` steps it, `upkeep/verifying.py` checks its files.
"""

import math
import threading
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from coordinator.store.data_directory import StateFiles


class State(NamedTuple):
    """A fragment's outer state: the number of the round that starts from it, and its digest."""

    round: int
    digest: bytes


@dataclass
class Job:
    """A fragment's job on another thread, which publishes its deltas and steps its outer state (`sync/publishing.py`).

    running   True while the job is at work
    retry_at  after a fault, such as a full disk: the earliest time to start again
    fault     the last fault, so that an event reports it only once
    """

    running: bool = False
    retry_at: float = -math.inf
    fault: str | None = None


class OuterState:
    """The outer state of a run. It has no fragments until state 0 is complete.

    files                the state files on disk
    jobs                 the job of each fragment
    deltas               digests of the last rounds' deltas, by round and fragment
    lost_deltas          (round, fragment) of each delta that is lost and cannot be rebuilt
    damaged_checkpoints  round -> what is wrong, for checkpoints that cannot be rebuilt
    damage               why the run cannot continue until its files are restored; None if it can
    """

    def __init__(self, files: StateFiles, lock: "threading.RLock") -> None:
        self.files = files
        self.jobs: list[Job] = []
        self._states: list[State] = []
        self._here: list[bool] = []
        self._deltas: dict[tuple[int, int], bytes] = {}
        self._lost_deltas: set[tuple[int, int]] = set()
        self._damaged_checkpoints: dict[int, str] = {}
        self._damage: str | None = None
        self._verification_wanted = False
        self._changed = threading.Condition(lock)

    # --- the states -----------------------------------------------------------------------------------------------

    @property
    def states(self) -> Sequence[State]:
        """The state of each fragment."""
        return self._states

    def begin(self, states: list[State], *, here: bool) -> None:
        """Start from these states, one per fragment: state 0, or the states recorded in the database. `here`: their
        files are on this machine."""
        self._states, self.jobs = states, [Job() for _ in states]
        self._here = [here] * len(states)

    def set(self, fragment: int, state: State, *, here: bool) -> None:
        """Move a fragment to another state: one step on, or back to a checkpoint. `here`: its file is on this
        machine."""
        self._states[fragment], self._here[fragment] = state, here
        self._changed.notify_all()

    def is_here(self, fragment: int) -> bool:
        """Return True if this process has written or checked the file of the fragment's state. If not, an aggregator
        may have the state, or an earlier process."""
        return self._here[fragment]

    def note_here(self, fragment: int, state: State) -> None:
        """Record that the file of `state` was found, unless the fragment has another state by now."""
        self._here[fragment] = self._here[fragment] or self._states[fragment] == state

    def await_round(self, fragment: int, round_: int, timeout_s: float) -> bool:
        """Wait until the fragment has reached the state of `round_` or a later one. Return False on timeout. Releases
        the run's lock while it waits."""
        return self._changed.wait_for(lambda: self._states[fragment].round >= round_, timeout=timeout_s)

    @property
    def any_job_running(self) -> bool:
        """True while a thread works on the run's deltas, states or checkpoints."""
        return any(job.running for job in self.jobs)

    # --- the deltas -----------------------------------------------------------------------------------------------

    @property
    def deltas(self) -> Mapping[tuple[int, int], bytes]:
        return MappingProxyType(self._deltas)

    def add_delta(self, round_: int, fragment: int, digest: bytes, *, last: bool) -> None:
        """Add a published delta. `last`: it is the last one of its round, so the deltas of earlier rounds are
        forgotten."""
        kept = {key: each for key, each in self._deltas.items() if key[0] >= round_ or not last}
        self._deltas = kept | {(round_, fragment): digest}  # a new dict: others read without the lock

    def forget_history(self) -> None:
        """Forget deltas and damage after a rollback: the same round numbers will have other files."""
        self._deltas, self._lost_deltas, self._damaged_checkpoints = {}, set(), {}

    # --- damaged files --------------------------------------------------------------------------------------------

    @property
    def lost_deltas(self) -> Set[tuple[int, int]]:
        return self._lost_deltas

    @property
    def damaged_checkpoints(self) -> Mapping[int, str]:
        return MappingProxyType(self._damaged_checkpoints)

    @property
    def damage(self) -> str | None:
        return self._damage

    def mark_delta_lost(self, round_: int, fragment: int) -> None:
        """Record that a delta's blob is lost for good: workers recover from a checkpoint instead."""
        self._lost_deltas.add((round_, fragment))

    def mark_damaged(self, checkpoint: int, reason: str) -> None:
        """Stop offering the checkpoint to workers."""
        self._damaged_checkpoints[checkpoint] = reason

    def mark_intact(self, checkpoint: int) -> None:
        """Offer the checkpoint again. Also called for a deleted checkpoint, to forget its damage."""
        self._damaged_checkpoints.pop(checkpoint, None)

    def block(self, damage: str) -> None:
        """Block the run: it cannot continue until its files are restored from a backup."""
        self._damage = damage

    def request_verification(self) -> None:
        """Have all files verified soon, because a blob was missing or damaged."""
        self._verification_wanted = True

    @property
    def verification_wanted(self) -> bool:
        return self._verification_wanted

    def begin_verification(self) -> None:
        """Clear the request for verification. Damage found from now on requests another one."""
        self._verification_wanted = False
