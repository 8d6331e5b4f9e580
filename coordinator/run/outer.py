"""The coordinator's own outer state in memory: where each fragment is, and the deltas that lead on from there."""

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.store.data_directory import StateFiles


class State(NamedTuple):
    """A fragment's outer state: the number of the round that starts from it, and its digest."""

    round: int
    digest: bytes


@dataclass
class Job:
    """A fragment's job on another thread, which publishes its deltas and steps its outer state (`publishing.py`).

    running   it is at work
    retry_at  after a fault, such as a full disk: when it may start again
    fault     what the last fault was, so that an event says it only once
    """

    running: bool = False
    retry_at: float = -math.inf
    fault: str | None = None


class OuterState:
    """The outer state of a run. It has no fragments until state 0 is complete.

    files    where it lies on disk
    jobs     of each fragment
    deltas   by round and fragment: the digests of the last rounds' deltas
    lost     rounds and fragments of deltas that cannot be made again
    spoilt   rounds of the checkpoints that cannot be made again, each with what is wrong, in words
    suspect  True where a blob was found missing: all of them are to be verified soon
    damage   why the run cannot go on until its files are restored; None if it can
    """

    def __init__(self, files: StateFiles, lock: "threading.RLock") -> None:
        self.files = files
        self.jobs: list[Job] = []
        self.deltas: dict[tuple[int, int], bytes] = {}
        self.lost: set[tuple[int, int]] = set()
        self.spoilt: dict[int, str] = {}
        self.suspect = False
        self.damage: str | None = None
        self._states: list[State] = []
        self._changed = threading.Condition(lock)

    @property
    def states(self) -> Sequence[State]:
        """The state of each fragment."""
        return self._states

    def begin(self, states: list[State]) -> None:
        """Begin with these states."""
        self._states, self.jobs = states, [Job() for _ in states]

    def set(self, fragment: int, state: State) -> None:
        """Put a fragment into another state."""
        self._states[fragment] = state
        self._changed.notify_all()

    def add_delta(self, round_: int, fragment: int, digest: bytes, *, last: bool) -> None:
        """Add a delta that was published. The last one of its round ends the use of those of earlier rounds."""
        kept = {key: each for key, each in self.deltas.items() if key[0] >= round_ or not last}
        self.deltas = kept | {(round_, fragment): digest}

    def forget_deltas(self) -> None:
        """Forget all deltas: rounds of the same numbers will have others."""
        self.deltas, self.lost, self.spoilt = {}, set(), {}

    def await_round(self, fragment: int, round_: int, timeout_s: float) -> bool:
        """Wait until the fragment's state is of `round_` or later; return False if time is up. Releases the run's lock
        meanwhile."""
        return self._changed.wait_for(lambda: self._states[fragment].round >= round_, timeout=timeout_s)
