"""The members of a run and their leases, by the coordinator's own monotonic clock; no other host's clock is used."""

import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace

from coordinator.run.decide import Silence
from protocol.messages import Metrics

MISSED = 3  # rounds in a row, after which no round waits for the worker
SILENT = 0.5  # share of a lease after which a heartbeat is overdue; there are three per lease
SEEDER_S = 1800.0  # for one fragment of state 0: half a gigabyte at 2 Mbit/s
OTHERS_ASK_S = 120.0  # within this time every waiting member has asked: a long poll lasts 60 s
LINGER_S = 1800.0  # for what remains after a run is over: the last deltas, an evaluation


@dataclass(frozen=True)
class Lease:
    """A live worker's lease: the hash of its member token, and the time and metrics of its last heartbeat. `token`: the
    id of the token that it joined with; None if unknown."""

    token_hash: bytes
    seen_at: float
    metrics: Metrics
    token: str | None = None


class Members:
    """The members of one run. A member that is silent for longer than `lease_s` seconds loses its lease.

    Members join and leave in changes of the run (`LiveRun.change`). Heartbeats renew leases without the run's lock,
    because it may be held during a write to the disk.

    seeder      the worker that uploads state 0; None until one has asked for an assignment
    evaluators  the workers that evaluate the final state

    A worker is *proven* once it has contributed to the run. A round waits for the proven workers that have not missed
    MISSED rounds in a row, and counts its quorum over them, with one vote per token. It waits for a newcomer once, and
    not longer than the grace. So names that never contribute delay nothing, and many names are no majority.
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
        self._previous: set[str] = set()  # assigned to the round before the open or next one
        self._proven: set[str] = set()
        self._seeder_at = 0.0  # when the seeder was appointed, or has last uploaded a fragment
        self._dismissed_at: dict[str, float] = {}  # workers that should have uploaded state 0 and did not
        self._must_leave_at: float | None = None  # since when all members must leave; None: they need not
        self._missed: dict[str, int] = {}  # rounds in a row, by worker, since this process started
        self._rows: int | None = None  # length of the data set from which scripts draw the run's units
        self._rows_of: set[str] = set()  # the workers that reported it
        self._lock = threading.Lock()  # for the leases

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
        """Grant a lease for a full term, in place of any that the worker holds. `proven`: it has contributed before."""
        if proven:
            self._proven.add(worker)
        self.own(worker, token)
        with self._lock:
            self._end(worker)
            self._leases[worker] = Lease(token_hash, now, metrics or Metrics(), token)
            self._by_token[token_hash] = worker

    def own(self, worker: str, token: str | None) -> None:
        """Record the token that the worker joined with, also if it no longer holds a lease."""
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
        """End the worker's lease, if it holds one, and forget its part in the next round."""
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
        """Return the workers whose lease has run out but was not ended yet, in worker-id order."""
        return sorted(worker for worker, lease in self._leases.items() if now - lease.seen_at > self.lease_s)

    def remaining_s(self, worker: str, now: float) -> float | None:
        """Return the seconds until the worker's lease runs out; None if it holds none."""
        lease = self._leases.get(worker)
        return None if lease is None else max(0.0, lease.seen_at + self.lease_s - now)

    def last_seen_s(self, worker: str, now: float) -> float | None:
        """Return the seconds since the worker's last heartbeat; None if it holds no lease."""
        lease = self._leases.get(worker)
        return None if lease is None else now - lease.seen_at

    def agree_on_rows(self, worker: str, rows: int) -> tuple[str, int] | None:
        """Record that the worker draws the run's units from a data set of `rows` rows. If another live worker has a
        different number, record nothing and return that worker's name and number."""
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
        """Return the metrics of the worker's last heartbeat; empty if there are none yet, or it holds no lease."""
        lease = self._leases.get(worker)
        return Metrics() if lease is None else lease.metrics

    def claimed_step_rates(self) -> dict[str, float | None]:
        """Return the inner steps per second that the live workers report; None: nothing yet."""
        with self._lock:
            return {worker: lease.metrics.inner_steps_per_second for worker, lease in self._leases.items()}

    def token(self, worker: str) -> str | None:
        """Return the id of the token that the worker joined with; None if unknown, or if the worker is not live."""
        lease = self._leases.get(worker)
        return None if lease is None else lease.token

    def joined_without(self, is_good: Callable[[str], bool]) -> list[str]:
        """Return the workers whose token is no longer good, in worker-id order."""
        with self._lock:
            leases = list(self._leases.items())
        return sorted(worker for worker, lease in leases if lease.token is not None and not is_good(lease.token))

    def linger(self, now: float, *, must_leave: bool) -> bool:
        """Return True if there are still members although all have had to leave for LINGER_S. `must_leave`: whether
        they have to now."""
        if not must_leave:
            self._must_leave_at = None
            return False
        if self._must_leave_at is None:
            self._must_leave_at = now
        return bool(self._leases) and now - self._must_leave_at > LINGER_S

    @property
    def owners(self) -> Mapping[str, str]:
        """The ids of the tokens that workers joined with, if known; also of workers that have left."""
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
        """The workers that hold the state of the next round and have asked for an assignment."""
        return self._ready

    def candidates(self) -> set[str]:
        """Return the workers with which the next round would open: the ready ones, and those of the last round."""
        return self.live() & (self._ready | self._previous)

    def get_ready(self, worker: str) -> None:
        """Record that `worker` holds the state of the next round and has asked for an assignment."""
        self._ready.add(worker)

    def appoint_seeder(self, worker: str, now: float) -> None:
        """Let `worker` upload state 0."""
        self.seeder, self._seeder_at = worker, now

    def quarantine(self, worker: str, until: int) -> None:
        """Keep the worker in quarantine until the round `until`. Its lease is not affected."""
        self._quarantined[worker] = until

    def quarantined(self, round_: int) -> set[str]:
        """Return the live workers that are in quarantine in this round."""
        return {worker for worker in self._leases if self._quarantined.get(worker, 0) > round_}

    # --- state 0 --------------------------------------------------------------------------------------------------

    def may_seed(self, worker: str, now: float) -> bool:
        """Return True unless the worker was once asked to upload state 0 and did not, and another one may still ask."""
        dismissed_at = self._dismissed_at.get(worker)
        if dismissed_at is None or now - dismissed_at > OTHERS_ASK_S:
            return True
        return self.live() <= self._dismissed_at.keys()

    def hear_seeder(self, now: float) -> None:
        """Record that the seeder has uploaded a fragment."""
        self._seeder_at = now

    def seeder_is_silent(self, now: float) -> bool:
        """Return True if there is a seeder, and it has uploaded nothing for SEEDER_S."""
        return self.seeder is not None and now - self._seeder_at > SEEDER_S

    def dismiss_seeder(self, now: float) -> None:
        """Let another worker upload state 0."""
        if self.seeder is not None:
            self._dismissed_at[self.seeder] = now
        self.seeder = None

    def begin_round(self) -> None:
        """Begin a round with the candidates. They must get ready again for the one after it."""
        self._ready.clear()

    def end_round(self, workers: Set[str], contributed: Set[str] = frozenset()) -> None:
        """End a round for which `workers` had assignments and to which `contributed` have contributed."""
        self._previous = set(workers)
        self._proven |= contributed
        for worker in contributed:
            self._missed.pop(worker, None)
        for worker in workers - contributed:
            self._missed[worker] = self._missed.get(worker, 0) + 1

    def contributing(self, workers: Set[str]) -> set[str]:
        """Return those of `workers` that are live, have contributed to the run, and have missed fewer than MISSED
        rounds in a row."""
        return {worker for worker in self.live() & workers & self._proven if self._missed.get(worker, 0) < MISSED}

    def waited_for(self, assigned: Set[str]) -> tuple[set[str], set[str]]:
        """Return the workers, among those `assigned` to a round, that it waits for: those over which its quorum is
        counted, and newcomers, which it waits for only during the grace. If no worker is proven, as in the first round,
        the quorum is counted over all."""
        live, contributing = self.live() & assigned, self.contributing(assigned)
        if not contributing:
            return live, set()
        return contributing, {worker for worker in live - self._proven if not self._missed.get(worker, 0)}
