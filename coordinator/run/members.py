"""The members of a run and their leases, by the coordinator's own monotonic clock; no other host's clock is used."""

import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace

from coordinator.run.decide import OverdueHeartbeat
from protocol.messages import Metrics, Stage

MISSED = 3  # no round waits for a worker that has missed this many in a row
MOST_REFUSED = 16  # workers whose refusals are recorded
SILENT = 0.5  # a heartbeat is overdue after this share of a lease; workers send three per lease
STALLED_STEPS = 10.0  # times as long as an inner step usually takes the worker; and a lease at least
SEEDER_S = 1800.0  # to upload one fragment of state 0: half a gigabyte at 2 Mbit/s
OTHERS_ASK_S = 120.0  # every waiting member asks again within this time, because a long poll lasts 60 s
LINGER_S = 1800.0  # to finish after a run is over: fetch the last deltas, evaluate


@dataclass(frozen=True)
class Lease:
    """A live worker's lease: the hash of its member token, and the time and metrics of its last heartbeat. `moved_at`:
    the time of the first heartbeat with the inner step, round and phase of the last one. `token`: the id of the token
    that it joined with; None if unknown."""

    token_hash: bytes
    seen_at: float
    metrics: Metrics
    moved_at: float
    token: str | None = None


class Members:
    """The members of one run. A member that sends no heartbeat for `lease_s` seconds loses its lease.

    Members join and leave in changes of the run (`LiveRun.change`). Heartbeats renew leases without the run's lock,
    because it may be held during a write to the disk.

    seeder      the worker that uploads state 0; None until one has asked for an assignment
    evaluators  the workers that evaluate the final state
    refused     why workers could not join, since this process started: their model or data differ
    stale       workers that may hold the run's state as it was before its last round was done again
    noted_stalled  the stalled workers that an event was recorded of

    A worker is *proven* once it has contributed to the run. A round waits for the proven workers that have not missed
    MISSED rounds in a row, and counts its quorum over them, with one vote per token. It waits for a newcomer only once,
    and only during the grace. So workers that never contribute cannot delay rounds, and one token cannot gain votes by
    joining under many names.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.seeder: str | None = None
        self.evaluators: set[str] = set()
        self.refused: dict[str, str] = {}
        self.stale: set[str] = set()
        self.noted_stalled: set[str] = set()
        self._leases: dict[str, Lease] = {}
        self._by_token_hash: dict[bytes, str] = {}
        self._owners: dict[str, str] = {}
        self._quarantined: dict[str, int] = {}
        self._harm: dict[str, str] = {}
        self._ready: set[str] = set()
        self._previous: set[str] = set()  # assigned to the round before the open or next one
        self._proven: set[str] = set()
        self._seeder_at = 0.0  # when the seeder was appointed or last uploaded a fragment
        self._dismissed_at: dict[str, float] = {}  # when each worker was dismissed that failed to upload state 0
        self._must_leave_at: float | None = None  # when all members were required to leave; None: they are not
        self._missed: dict[str, int] = {}  # rounds in a row, by worker, since this process started
        self._rows: int | None = None  # length of the data set that scripts use for the run's units
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
        self.record_owner(worker, token)
        self.refused.pop(worker, None)
        with self._lock:
            self._end(worker)
            self._leases[worker] = Lease(token_hash, now, metrics or Metrics(), now, token)
            self._by_token_hash[token_hash] = worker

    def refuse(self, worker: str, reason: str) -> bool:
        """Record why the worker cannot join. Return False if that is known, or too many workers are refused."""
        if self.refused.get(worker) == reason or (worker not in self.refused and len(self.refused) >= MOST_REFUSED):
            return False
        self.refused[worker] = reason
        return True

    def record_owner(self, worker: str, token: str | None) -> None:
        """Record the token that the worker joined with, even if it no longer holds a lease."""
        if token is None:
            self._owners.pop(worker, None)
        else:
            self._owners[worker] = token

    def renew(self, worker: str, now: float, metrics: Metrics) -> bool:
        """Renew the worker's lease for a full term. Return False if it has ended."""
        with self._lock:
            lease = self._leases.get(worker)
            if lease is not None:
                moved_at = lease.moved_at if _progress(metrics) == _progress(lease.metrics) else now
                self._leases[worker] = replace(lease, seen_at=now, metrics=metrics, moved_at=moved_at)
            return lease is not None

    def leave(self, worker: str) -> None:
        """End the worker's lease, if it holds one, and forget that it was ready for the next round."""
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
            self._by_token_hash.pop(lease.token_hash)

    def expired(self, now: float) -> list[str]:
        """Return the workers with a lease that has run out but was not ended yet, ordered by worker id."""
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

    def silent(self, now: float) -> dict[str, OverdueHeartbeat]:
        """Return the live workers with an overdue heartbeat, and how long each has been silent."""
        with self._lock:
            heard = {worker: now - lease.seen_at for worker, lease in self._leases.items()}
        overdue_s = SILENT * self.lease_s
        return {
            worker: OverdueHeartbeat(seconds, max(0.0, self.lease_s - seconds))
            for worker, seconds in heard.items()
            if seconds > overdue_s
        }

    def stalled(self, now: float) -> dict[str, float]:
        """Return the live workers that should train and take no inner step, and for how many seconds: for a lease, and
        STALLED_STEPS times as long as a step took them in the round before. Their heartbeats may go on, because another
        thread sends them. A worker that has not reported its speed yet is never among them."""
        found = {}
        with self._lock:
            for worker, lease in self._leases.items():
                rate = lease.metrics.inner_steps_per_second
                if lease.metrics.phase == Stage.TRAIN and rate is not None and rate > 0:
                    seconds = now - lease.moved_at
                    if seconds > max(self.lease_s, STALLED_STEPS / rate):
                        found[worker] = seconds
        return found

    def metrics(self, worker: str) -> Metrics:
        """Return the metrics of the worker's last heartbeat; empty if it has sent none or holds no lease."""
        lease = self._leases.get(worker)
        return Metrics() if lease is None else lease.metrics

    def token(self, worker: str) -> str | None:
        """Return the id of the token that the worker joined with; None if unknown, or if the worker is not live."""
        lease = self._leases.get(worker)
        return None if lease is None else lease.token

    def with_invalid_token(self, is_good: Callable[[str], bool]) -> list[str]:
        """Return the workers with a token that is no longer good, ordered by worker id. `is_good` takes the id of a
        token."""
        with self._lock:
            leases = list(self._leases.items())
        return sorted(worker for worker, lease in leases if lease.token is not None and not is_good(lease.token))

    def are_lingering(self, now: float, *, must_leave: bool) -> bool:
        """Return True if members remain although all have been required to leave for LINGER_S seconds. `must_leave`:
        whether they are required to leave now."""
        if not must_leave:
            self._must_leave_at = None
            return False
        if self._must_leave_at is None:
            self._must_leave_at = now
        return bool(self._leases) and now - self._must_leave_at > LINGER_S

    @property
    def owners(self) -> Mapping[str, str]:
        """The ids of the tokens that workers joined with, by worker, where known; workers that have left are
        included."""
        return self._owners

    @property
    def by_token_hash(self) -> Mapping[bytes, str]:
        """The live workers, by the hash of their member token."""
        return self._by_token_hash

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
        """Return the workers of the next round, if it opened now: those that are ready, and those of the last round."""
        return self.live() & (self._ready | self._previous)

    def mark_ready(self, worker: str) -> None:
        """Record that `worker` holds the state of the next round and has asked for an assignment."""
        self._ready.add(worker)

    def appoint_seeder(self, worker: str, now: float) -> None:
        """Let `worker` upload state 0."""
        self.seeder, self._seeder_at = worker, now

    def quarantine(self, worker: str, until: int, harm: str = "") -> None:
        """Keep the worker in quarantine until the round `until`. Its lease is not affected. `harm`: as `Reputation` has
        it."""
        self._quarantined[worker] = until
        self._harm[worker] = harm

    def harmful(self, round_: int) -> dict[str, str]:
        """Return the workers whose contributions do not count in this round, and why."""
        return {worker: harm for worker, harm in self._harm.items() if harm and self._quarantined[worker] > round_}

    def quarantined(self, round_: int) -> set[str]:
        """Return the live workers that are in quarantine in this round."""
        return {worker for worker in self._leases if self.is_quarantined(worker, round_)}

    def is_quarantined(self, worker: str, round_: int) -> bool:
        """Return True if the worker is in quarantine in this round. May be asked without the run's lock."""
        return self._quarantined.get(worker, 0) > round_

    # --- state 0 --------------------------------------------------------------------------------------------------

    def may_seed(self, worker: str, now: float) -> bool:
        """Return True if the worker may be asked to upload state 0. A worker that was asked and failed is asked again
        only once OTHERS_ASK_S seconds have passed, or all live workers have failed."""
        dismissed_at = self._dismissed_at.get(worker)
        if dismissed_at is None or now - dismissed_at > OTHERS_ASK_S:
            return True
        return self.live() <= self._dismissed_at.keys()

    def note_seeder_upload(self, now: float) -> None:
        """Record that the seeder has uploaded a fragment."""
        self._seeder_at = now

    def seeder_is_silent(self, now: float) -> bool:
        """Return True if there is a seeder and it has uploaded nothing for SEEDER_S seconds."""
        return self.seeder is not None and now - self._seeder_at > SEEDER_S

    def dismiss_seeder(self, now: float) -> None:
        """Take the upload of state 0 away from the seeder, so that another worker can be appointed."""
        if self.seeder is not None:
            self._dismissed_at[self.seeder] = now
        self.seeder = None

    def begin_round(self) -> None:
        """Begin a round with the candidates. They must report ready again for the next one."""
        self._ready.clear()

    def end_round(self, workers: Set[str], contributed: Set[str] = frozenset()) -> None:
        """End a round. `workers`: those that had assignments for it. `contributed`: those that contributed to it."""
        self._previous = set(workers)
        self._proven |= contributed
        for worker in contributed:
            self._missed.pop(worker, None)
        for worker in workers - contributed:
            self._missed[worker] = self._missed.get(worker, 0) + 1

    def missed(self, worker: str) -> int:
        """Return how many rounds in a row the worker has missed."""
        return self._missed.get(worker, 0)

    def contributing(self, workers: Set[str]) -> set[str]:
        """Return those of `workers` that are live, have contributed to the run, and have missed fewer than MISSED
        rounds in a row."""
        return {worker for worker in self.live() & workers & self._proven if self._missed.get(worker, 0) < MISSED}

    def waited_for(self, assigned: Set[str]) -> tuple[set[str], set[str]]:
        """Return (voters, newcomers), the workers of those `assigned` that the round waits for. The quorum is counted
        over the voters; newcomers are waited for only during the grace. If no worker is proven, as in the first round,
        all are voters."""
        live, contributing = self.live() & assigned, self.contributing(assigned)
        if not contributing:
            return live, set()
        return contributing, {worker for worker in live - self._proven if not self._missed.get(worker, 0)}


def _progress(metrics: Metrics) -> tuple[int | None, int | None, str | None]:
    return metrics.round, metrics.inner_step, metrics.phase
