"""Leases: who is alive, by the coordinator's own monotonic clock. No other host's clock is ever used."""

import threading
from dataclasses import dataclass, field


@dataclass
class Leases:
    """The leases of one run. A worker that is silent for longer than `term_s` seconds loses its lease.

    Leases are granted and ended under the run's lock. Heartbeats do not take it, because it may be held while somebody
    writes to the disk.
    """

    term_s: float
    _seen_at: dict[str, float] = field(default_factory=dict)  # by worker: when it was last heard of
    _lock: threading.Lock = field(default_factory=lambda: threading.Lock())

    def renew(self, worker: str, now: float) -> None:
        """Grant a lease, or renew it for a full term."""
        self._seen_at[worker] = now

    def renew_live(self, worker: str, now: float) -> bool:
        """Renew a lease for a full term and return True; return False if it has ended."""
        with self._lock:
            if worker not in self._seen_at:
                return False
            self._seen_at[worker] = now
            return True

    def end(self, worker: str) -> None:
        """End the worker's lease, if it holds one."""
        with self._lock:
            self._seen_at.pop(worker, None)

    def expired(self, now: float) -> list[str]:
        """Return the workers whose lease has run out and was not ended yet, in worker-id order."""
        return sorted(worker for worker, seen_at in self._seen_at.items() if now - seen_at > self.term_s)

    def remaining_s(self, worker: str, now: float) -> float | None:
        """Return the seconds until the worker's lease runs out; None if it holds none."""
        seen_at = self._seen_at.get(worker)
        return None if seen_at is None else max(0.0, seen_at + self.term_s - now)

    def last_seen_s(self, worker: str, now: float) -> float | None:
        """Return how many seconds ago the worker was last heard of; None if it holds no lease."""
        seen_at = self._seen_at.get(worker)
        return None if seen_at is None else now - seen_at

    def live(self) -> set[str]:
        """Return the workers that hold a lease."""
        return set(self._seen_at)

    def __contains__(self, worker: str) -> bool:
        return worker in self._seen_at

    def __len__(self) -> int:
        return len(self._seen_at)
