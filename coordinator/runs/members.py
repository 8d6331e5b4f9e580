"""Who takes part in a run, and who is alive, by the coordinator's own monotonic clock: no other host's is ever used."""

import threading
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Literal

from protocol.messages import Metrics


@dataclass(frozen=True)
class Lease:
    """What a live worker holds: its member token, and what it said and when, as it was last heard of."""

    token_hash: bytes
    seen_at: float
    metrics: Metrics


class Members:
    """The members of one run. One that is silent for longer than `lease_s` seconds loses its lease.

    Changes of the run let members join and leave. Heartbeats renew leases without the run's lock, because it may be
    held while somebody writes to the disk.

    seeder     the worker that uploads state 0; None until one has asked what to do
    evaluator  the worker that evaluates the final state; None until one has asked what to do
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.seeder: str | None = None
        self.evaluator: str | None = None
        self._leases: dict[str, Lease] = {}
        self._by_token: dict[bytes, str] = {}
        self._ready: set[str] = set()
        self._previous: set[str] = set()  # of the round before the next or open one
        self._lock = threading.Lock()  # of the leases

    def join(self, worker: str, token_hash: bytes, now: float, metrics: Metrics | None = None) -> None:
        """Grant a lease for a full term, in place of the one that the worker may hold."""
        with self._lock:
            self._end(worker)
            self._leases[worker] = Lease(token_hash, now, metrics or Metrics())
            self._by_token[token_hash] = worker

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
        if self.evaluator == worker:
            self.evaluator = None

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

    def metrics(self, worker: str) -> Metrics:
        """Return what the worker's last heartbeat said; empty if it said nothing yet, or holds no lease."""
        lease = self._leases.get(worker)
        return Metrics() if lease is None else lease.metrics

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

    def appoint(self, duty: Literal["seeder", "evaluator"], worker: str) -> None:
        """Give `worker` a duty that only one has."""
        setattr(self, duty, worker)

    def begin_round(self) -> None:
        """Begin a round with the candidates. For the one after it they get ready anew."""
        self._ready.clear()

    def end_round(self, workers: Set[str]) -> None:
        """End a round, for which `workers` had assignments."""
        self._previous = set(workers)
