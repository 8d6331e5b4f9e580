"""The open round in memory: who has an assignment for it, and what each fragment has collected."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from coordinator.run.decide import NONE_SILENT, Close, Silence, decide, has_quorum
from coordinator.screening.measuring import Found
from protocol.messages import FragmentState
from protocol.spec.sections import MembersSpec


@dataclass(frozen=True)
class AcceptedContribution:
    """An accepted contribution: the tokens that it may weigh, and the digest that names its blob.

    found  what it is judged by; None after a restart, or where there was no room for it, until it is looked at again
    at     when it was there, by the monotonic clock; None after a restart
    """

    tokens: int
    digest: bytes
    found: Found | None = None
    at: float | None = None


@dataclass
class OpenFragment:
    """One fragment of the open round. Times are of the monotonic clock.

    contributed   the accepted contributions, by worker
    weights       what each of them weighs, in tokens, by worker; fixed when the fragment is closed
    silent        True while it waits for a worker whose heartbeat is overdue
    contents      the payloads of those that are also in memory, by worker, until they are averaged
    """

    state: FragmentState = FragmentState.COLLECTING
    reason: str = "just opened"
    contributed: dict[str, AcceptedContribution] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    contents: dict[str, memoryview] = field(default_factory=dict)
    quorum_at: float | None = None
    closes_at: float | None = None
    silent: bool = False

    def due(
        self,
        expected: Set[str],
        newcomers: Set[str],
        owners: Mapping[str, str],
        policy: MembersSpec,
        opened_at: float,
        now: float,
        silent: Mapping[str, Silence] = NONE_SILENT,
    ) -> Close | None:
        """Decide whether this fragment closes now. Return the contributors to close it with, or None to keep
        collecting; either way record the reason and when to decide again. The quorum is counted over `expected`
        workers, one vote per token owner; `newcomers` are waited for but do not count. `silent`: as for `decide`."""
        if self.state is not FragmentState.COLLECTING:
            return None
        contributed = self.contributed.keys()
        if self.quorum_at is None and has_quorum(expected, contributed, policy, owners):
            self.quorum_at = now
        waited_for = expected | newcomers
        decision = decide(
            waited_for, contributed, policy, opened_at=opened_at, quorum_at=self.quorum_at, now=now, silent=silent
        )
        self.reason = decision.reason
        if isinstance(decision, Close):
            self.silent = False
            return decision
        self.closes_at, self.silent = decision.until, decision.silent
        return None


@dataclass(frozen=True)
class RoundAssignment:
    """One worker's assignment for the open round, as in the database. `units`: half-open ranges."""

    inner_steps: int
    evaluate: bool
    units: list[tuple[int, int]]


@dataclass
class OpenRound:
    """The round that is being worked on.

    step                   inner steps of the run's schedule before it
    steps                  those of it, for a worker that does all of its own
    assigned               workers that hold an assignment for it
    assignments            by worker, as far as they are in memory
    handed_out             by worker: when it was told of its assignment first, by the monotonic clock
    without_earlier_units  workers known to hold no units of earlier rounds
    consumed               by worker: the units that its contribution to this round has consumed
    diverged               workers that were refused because they hold another state

    What is kept of assignments and units spares the database the same queries by a thousand workers at once, and for
    every fragment.
    """

    number: int
    step: int
    steps: int
    opened_at: float
    assigned: set[str]
    fragments: list[OpenFragment]
    assignments: dict[str, RoundAssignment] = field(default_factory=dict)
    handed_out: dict[str, float] = field(default_factory=dict)
    without_earlier_units: set[str] = field(default_factory=set)
    consumed: dict[str, list[list[int]]] = field(default_factory=dict)
    diverged: set[str] = field(default_factory=set)

    def agrees_on_earlier_units(self, worker: str, carried: Sequence[Sequence[int]] | None) -> bool:
        """Return True if worker and database need not be compared: the worker carries no units of earlier rounds and
        none are assigned to it, or it does not say what it carries."""
        return carried is None or (not carried and worker in self.without_earlier_units)

    def assign(self, worker: str, assignment: RoundAssignment, carried: Sequence[Sequence[int]] | None) -> None:
        """Give `worker`, with which the database agrees now on the units `carried`, its assignment."""
        self.assigned.add(worker)
        self.assignments[worker] = assignment
        if carried is not None and not carried:
            self.without_earlier_units.add(worker)

    @property
    def contributed(self) -> set[str]:
        """The workers that have contributed to any fragment."""
        return {worker for fragment in self.fragments for worker in fragment.contributed}

    def paces(self, unit_tokens: int) -> dict[str, tuple[int, float]]:
        """Return for each contributor the steps of its first contribution, and the seconds that it took to be there."""
        first: dict[str, tuple[float, int]] = {}
        for fragment in self.fragments:
            for worker, each in fragment.contributed.items():
                if each.at is not None and worker in self.handed_out:
                    mine = each.at - self.handed_out[worker], each.tokens // unit_tokens
                    first[worker] = min(first.get(worker, mine), mine)
        return {worker: (steps, seconds) for worker, (seconds, steps) in first.items()}

    def leave(self, worker: str) -> None:
        """Forget what is in memory of a worker whose lease has ended. Its contributions stay, and so does its part."""
        self.assignments.pop(worker, None)
        self.handed_out.pop(worker, None)
        self.diverged.discard(worker)
