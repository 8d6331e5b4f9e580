"""Who takes part in a run, and who is alive, by the coordinator's own monotonic clock: no other host's is ever used."""

import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace

from coordinator.run.decide import Silence
from protocol.messages import Metrics

MISSED = 3
SILENT = 0.5  # of a lease: heartbeats come three times in one, so this one is overdue
SEEDER_S = 1800.0  # for one fragment of state 0: half a gigabyte at 2 Mbit/s
OTHERS_ASK_S = 120.0  # in which members that want an assignment have asked: a long poll lasts for 60 s
LINGER_S = 1800.0  # for what is left to do once a run is over: the last deltas, an evaluation


@dataclass(frozen=True)
class Lease:
    """What a live worker holds: its member token, and what it said and when, as it was last heard of. `token`: the id
    of the token that it joined with; None: that was before these were kept."""

    token_hash: bytes
    seen_at: float
    metrics: Metrics
    token: str | None = None


class Members:
    """The members of one run. One that is silent for longer than `lease_s` seconds loses its lease.

    Changes of the run let members join and leave. Heartbeats renew leases without the run's lock, because it may be
    held while somebody writes to the disk.

    seeder     the worker that uploads state 0; None until one has asked what to do
    evaluators  the workers that evaluate the final state

    A worker is *proven* once it has contributed to the run. A round waits for the proven ones that have not missed
    MISSED rounds in a row, and makes its quorum of them, in which every token has one voice; for a newcomer it waits
    once, and no longer than the grace. So names that never contribute hold up nobody, and many names are no majority.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.seeder: str | None = None
        self.evaluators: set[str] = set()
        self._leases: dict[str, Lease] = {}
        self._by_token: dict[bytes, str] = {}
        self._owners: dict[str, str] = {}
        self._quarantined: dict[str, int] = {}
        self._ready: set[str] = set()
        self._previous: set[str] = set()  # of the round before the next or open one
        self._proven: set[str] = set()
        self._seeder_at = 0.0  # when the seeder was appointed, or has last uploaded a fragment
        self._dismissed_at: dict[str, float] = {}  # of the workers that were to upload state 0 and did not
        self._sent_home_at: float | None = None  # when all were told to leave; None: they were not
        self._missed: dict[str, int] = {}  # rounds in a row, by worker; as far as this process has seen them
        self._rows: int | None = None  # of the data set that scripts draw the run's units from
        self._rows_of: set[str] = set()  # the workers that said so
        self._lock = threading.Lock()  # of the leases

    def join(
        self,
        worker: str,
        token_hash: bytes,
        now: float,
        metrics: Metrics | None = None,
        token: str | None = None,
        *,
        proven: bool = False,
    ) -> None:
        """Grant a lease for a full term, in place of the one that the worker may hold. `proven`: it has contributed to
        the run before."""
        if proven:
            self._proven.add(worker)
        self.own(worker, token)
        with self._lock:
            self._end(worker)
            self._leases[worker] = Lease(token_hash, now, metrics or Metrics(), token)
            self._by_token[token_hash] = worker

    def own(self, worker: str, token: str | None) -> None:
        """Note with which token the worker has joined, also where it holds no lease any more."""
        if token is None:
            self._owners.pop(worker, None)
        else:
            self._owners[worker] = token

    def renew(self, worker: str, now: float, metrics: Metrics) -> bool:
        """Renew a lease for a full term and return True; return False if it has ended."""
        with self._lock:
            lease = self._leases.get(worker)
            if lease is not None:
                self._leases[worker] = replace(lease, seen_at=now, metrics=metrics)
            return lease is not None

    def leave(self, worker: str) -> None:
        """End the worker's lease, if it holds one, and with it whatever is known of it here."""
        with self._lock:
            self._end(worker)
        self._ready.discard(worker)
        self._previous.discard(worker)
        if self.seeder == worker:
            self.seeder = None
        self.evaluators.discard(worker)

    def _end(self, worker: str) -> None:
        lease = self._leases.pop(worker, None)
        if lease is not None:
            self._by_token.pop(lease.token_hash)

    def expired(self, now: float) -> list[str]:
        """Return the workers whose lease has run out and was not ended yet, in worker-id order."""
        return sorted(worker for worker, lease in self._leases.items() if now - lease.seen_at > self.lease_s)

    def remaining_s(self, worker: str, now: float) -> float | None:
        """Return the seconds until the worker's lease runs out; None if it holds none."""
        lease = self._leases.get(worker)
        return None if lease is None else max(0.0, lease.seen_at + self.lease_s - now)

    def last_seen_s(self, worker: str, now: float) -> float | None:
        """Return how many seconds ago the worker was last heard of; None if it holds no lease."""
        lease = self._leases.get(worker)
        return None if lease is None else now - lease.seen_at

    def agree_on_rows(self, worker: str, rows: int) -> tuple[str, int] | None:
        """Record that the worker draws the run's units from a data set of `rows` rows. If another live worker's has a
        different number, return its name and that number, and record nothing."""
        with self._lock:
            if rows != self._rows:
                others = sorted(name for name in self._rows_of if name in self._leases and name != worker)
                if others and self._rows is not None:
                    return others[0], self._rows
                self._rows, self._rows_of = rows, set()
            self._rows_of.add(worker)
            return None

    def silent(self, now: float) -> dict[str, Silence]:
        """Return the live workers whose heartbeat is overdue."""
        with self._lock:
            heard = {worker: now - lease.seen_at for worker, lease in self._leases.items()}
        overdue_s = SILENT * self.lease_s
        return {
            worker: Silence(seconds, max(0.0, self.lease_s - seconds))
            for worker, seconds in heard.items()
            if seconds > overdue_s
        }

    def metrics(self, worker: str) -> Metrics:
        """Return what the worker's last heartbeat said; empty if it said nothing yet, or holds no lease."""
        lease = self._leases.get(worker)
        return Metrics() if lease is None else lease.metrics

    def claimed_paces(self) -> dict[str, float | None]:
        """Return what the live workers say of their pace, in inner steps per second; None: nothing yet."""
        with self._lock:
            return {worker: lease.metrics.inner_steps_per_second for worker, lease in self._leases.items()}

    def token(self, worker: str) -> str | None:
        """Return the id of the token that the worker joined with; None if it is not known, or the worker not live."""
        lease = self._leases.get(worker)
        return None if lease is None else lease.token

    def joined_without(self, is_good: Callable[[str], bool]) -> list[str]:
        """Return the workers whose token `is_good` no more, in worker-id order."""
        with self._lock:
            leases = list(self._leases.items())
        return sorted(worker for worker, lease in leases if lease.token is not None and not is_good(lease.token))

    def linger(self, now: float, *, sent_home: bool) -> bool:
        """Return True if there are members though all were told to leave LINGER_S ago. `sent_home`: whether they are
        told so now."""
        if not sent_home:
            self._sent_home_at = None
            return False
        if self._sent_home_at is None:
            self._sent_home_at = now
        return bool(self._leases) and now - self._sent_home_at > LINGER_S

    @property
    def owners(self) -> Mapping[str, str]:
        """The ids of the tokens that workers have joined with, as far as they are known; also of those that left."""
        return self._owners

    @property
    def by_token(self) -> Mapping[bytes, str]:
        """The live workers, by the hash of their member token."""
        return self._by_token

    def live(self) -> set[str]:
        """Return the workers that hold a lease."""
        return set(self._leases)

    def __contains__(self, worker: str) -> bool:
        return worker in self._leases

    def __len__(self) -> int:
        return len(self._leases)

    # --- rounds ---------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> Set[str]:
        """The workers that hold the state of the next round and have asked what to do."""
        return self._ready

    def candidates(self) -> set[str]:
        """Return the workers with which the next round would open: those that are ready, and those of the last one."""
        return self.live() & (self._ready | self._previous)

    def get_ready(self, worker: str) -> None:
        """Note that `worker` holds the state of the next round and has asked what to do."""
        self._ready.add(worker)

    def appoint_seeder(self, worker: str, now: float) -> None:
        """Let `worker` upload state 0."""
        self.seeder, self._seeder_at = worker, now

    def quarantine(self, worker: str, until: int) -> None:
        """Note that the worker takes part again from the round `until` on. Its lease has nothing to do with it."""
        self._quarantined[worker] = until

    def quarantined(self, round_: int) -> set[str]:
        """Return the live workers that are in quarantine in this round."""
        return {worker for worker in self._leases if self._quarantined.get(worker, 0) > round_}

    # --- state 0 --------------------------------------------------------------------------------------------------

    def may_seed(self, worker: str, now: float) -> bool:
        """Return True unless the worker was to upload state 0 and did not, and another one may still ask to."""
        dismissed_at = self._dismissed_at.get(worker)
        if dismissed_at is None or now - dismissed_at > OTHERS_ASK_S:
            return True
        return self.live() <= self._dismissed_at.keys()

    def hear_seeder(self, now: float) -> None:
        """Note that the seeder has uploaded a fragment."""
        self._seeder_at = now

    def seeder_is_silent(self, now: float) -> bool:
        """Return True if there is a seeder, and it has uploaded nothing for SEEDER_S."""
        return self.seeder is not None and now - self._seeder_at > SEEDER_S

    def dismiss_seeder(self, now: float) -> None:
        """Let somebody else upload state 0."""
        if self.seeder is not None:
            self._dismissed_at[self.seeder] = now
        self.seeder = None

    def begin_round(self) -> None:
        """Begin a round with the candidates. For the one after it they get ready anew."""
        self._ready.clear()

    def end_round(self, workers: Set[str], contributed: Set[str] = frozenset()) -> None:
        """End a round, for which `workers` had assignments and to which `contributed` have contributed."""
        self._previous = set(workers)
        self._proven |= contributed
        for worker in contributed:
            self._missed.pop(worker, None)
        for worker in workers - contributed:
            self._missed[worker] = self._missed.get(worker, 0) + 1

    def contributing(self, workers: Set[str]) -> set[str]:
        """Return those of `workers` that are live, have contributed to the run and have not missed MISSED rounds in a
        row."""
        return {worker for worker in self.live() & workers & self._proven if self._missed.get(worker, 0) < MISSED}

    def waited_for(self, assigned: Set[str]) -> tuple[set[str], set[str]]:
        """Return for whom of those that hold an assignment a round waits: those of whom it makes its quorum, and those
        that have the grace alone. Where nobody is proven, as in the first round, all are alike."""
        live, contributing = self.live() & assigned, self.contributing(assigned)
        if not contributing:
            return live, set()
        return contributing, {worker for worker in live - self._proven if not self._missed.get(worker, 0)}
