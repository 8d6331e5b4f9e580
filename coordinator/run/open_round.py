"""The open round in memory: which workers have an assignment for it, and what each fragment has collected."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from coordinator.aggregation.measuring import Measure
from coordinator.aggregation.tasks import NOT_LATE, Lateness
from coordinator.run.decide import (
    NONE_SILENT,
    NONE_STALLED,
    Close,
    OverdueHeartbeat,
    decide,
    has_quorum,
    without_refused,
)
from protocol.messages import FragmentState
from protocol.spec.sections import MembersSpec


@dataclass(frozen=True)
class AcceptedContribution:
    """An accepted contribution: its largest possible weight in tokens, and the digest that names its blob.

    measured  the measure of its bytes; None if memory had no room, or after a restart, until it is computed again
    at        arrival time on the monotonic clock, in seconds; None after a restart
    sha256    SHA-256 of its bytes, as the store confirmed it; None if it came through the coordinator, which has
              checked the bytes itself
    lateness  what work of missed rounds may be in it
    """

    tokens: int
    digest: bytes
    measured: Measure | None = None
    at: float | None = None
    sha256: bytes | None = None
    lateness: Lateness = NOT_LATE


@dataclass
class OpenFragment:
    """One fragment of the open round. Times are seconds of the monotonic clock.

    contributed   the accepted contributions, by worker
    weights       their weights in tokens, by worker; set when the fragment closes
    silent        True while the fragment waits for a worker with an overdue heartbeat
    contents      the payloads that are also kept in memory until they are averaged, by worker
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
        opening: "OpenRound",
        now: float,
        silent: Mapping[str, OverdueHeartbeat] = NONE_SILENT,
        refused: Set[str] = frozenset(),
        stalled: Mapping[str, float] = NONE_STALLED,
    ) -> Close | None:
        """Decide whether this fragment closes now. Return the contributors to close it with, or None to keep
        collecting; either way record the reason and when to decide again. The quorum is counted over `expected`
        workers, one vote per token owner; `newcomers` are waited for but do not count. `silent`, `stalled`: as for
        `decide`. `refused`: workers without which the quorum must be reachable."""
        if self.state is not FragmentState.COLLECTING:
            return None
        contributed, waited_for = self.contributed.keys(), expected | newcomers
        reachable = without_refused(policy, waited_for, contributed, refused)
        if self.quorum_at is None and has_quorum(expected, contributed, reachable, owners):
            self.quorum_at = now
        decision = decide(
            waited_for,
            contributed,
            policy,
            opened_at=opening.opened_at,
            quorum_at=self.quorum_at,
            now=now,
            grace_from=opening.grace_from,
            silent=silent,
            stalled=stalled,
        )
        self.reason = decision.reason
        if isinstance(decision, Close):
            self.silent = False
            return decision
        self.closes_at, self.silent = decision.until, decision.silent
        return None


@dataclass(frozen=True)
class RoundAssignment:
    """One worker's assignment for the open round, as in the database. `units`: half-open ranges [start, stop)."""

    inner_steps: int
    evaluate: bool
    units: list[tuple[int, int]]


@dataclass
class OpenRound:
    """The open round.

    step                   inner steps of the run's schedule before it
    steps                  schedule steps of this round, if all of it is trained
    assigned               workers that hold an assignment for it
    fastest                inner steps per second of the fastest worker, as far as it is credible; None if no rate is
                           known, or if all have the same H
    assignments            the assignments that are in memory, by worker
    handed_out             when each worker first received its assignment, by the monotonic clock
    begun_at               when the first of those whose contributions count did; None: nobody has it yet
    without_earlier_units  workers known to hold no units of earlier rounds
    consumed               the units that each worker's contribution to this round has consumed, by worker
    diverged               workers that had a contribution rejected because they hold another state
    refused                workers that had a contribution rejected for what it is, this or anything else

    Assignments and units are kept in memory because all workers ask at the same time, and each one again for every
    fragment: a thousand workers would repeat the same database queries.
    """

    number: int
    step: int
    steps: int
    opened_at: float
    assigned: set[str]
    fragments: list[OpenFragment]
    fastest: float | None = None
    assignments: dict[str, RoundAssignment] = field(default_factory=dict)
    handed_out: dict[str, float] = field(default_factory=dict)
    begun_at: float | None = None
    without_earlier_units: set[str] = field(default_factory=set)
    consumed: dict[str, list[list[int]]] = field(default_factory=dict)
    diverged: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)

    def agrees_on_earlier_units(self, worker: str, carried: Sequence[Sequence[int]] | None) -> bool:
        """Return True if the worker's carried units need not be compared with the database: it carries no units and
        holds none of earlier rounds, or it does not report what it carries (`carried` is None)."""
        return carried is None or (not carried and worker in self.without_earlier_units)

    def began_without_earlier_units(self, worker: str) -> bool:
        """Return True if the worker has its assignment and carries no units. If a request that arrives late gave it
        some again, it would not know of them."""
        return worker in self.handed_out and worker in self.without_earlier_units

    def assign(self, worker: str, assignment: RoundAssignment, carried: Sequence[Sequence[int]] | None) -> None:
        """Give `worker` its assignment. `carried`: the units that the worker carries, as reported; the database already
        agrees."""
        self.assigned.add(worker)
        self.assignments[worker] = assignment
        if carried is not None and not carried:
            self.without_earlier_units.add(worker)

    @property
    def contributed(self) -> set[str]:
        """The workers that have contributed to any fragment."""
        return {worker for fragment in self.fragments for worker in fragment.contributed}

    @property
    def grace_from(self) -> float:
        """When the grace may begin at the earliest. Where each worker has an H by its speed, that is once the fastest
        has had time for its own; else what others began in an earlier round would close this one on it."""
        return self.opened_at + (0.0 if self.fastest is None else self.steps / self.fastest)

    def step_times(self, unit_tokens: Callable[[str], int]) -> dict[str, tuple[int, float]]:
        """Return (steps, seconds) of each contributor's first contribution: the inner steps in it, and the time from
        the worker's assignment to its arrival. `unit_tokens` returns the weight of a worker's unit."""
        first: dict[str, tuple[float, int]] = {}
        for fragment in self.fragments:
            for worker, each in fragment.contributed.items():
                if each.at is not None and worker in self.handed_out:
                    mine = each.at - self.handed_out[worker], each.tokens // unit_tokens(worker)
                    first[worker] = min(first.get(worker, mine), mine)
        return {worker: (steps, seconds) for worker, (seconds, steps) in first.items()}

    def leave(self, worker: str) -> None:
        """Forget what memory holds about a worker whose lease has ended. It stays `assigned`, and its contributions
        count."""
        self.assignments.pop(worker, None)
        self.handed_out.pop(worker, None)
        self.diverged.discard(worker)
