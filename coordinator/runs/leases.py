"""Leases: who is alive, by the coordinator's own monotonic clock. No other host's clock is ever looked at."""

import threading
from dataclasses import dataclass, field


@dataclass
class Leases:
    """Worker name -> when it was last heard of. A worker silent for `term_s` has lost its lease.

    Leases are granted and ended under the run's lock. Heartbeats do without it, for others hold it while they write to
    the disk.
    """

    term_s: float
    _seen_at: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=lambda: threading.Lock())

    def renew(self, worker: str, now: float) -> None:
        """Grant a lease, or a full new term of one."""
        self._seen_at[worker] = now

    def renew_live(self, worker: str, now: float) -> bool:
        """Give a lease a full new term, unless it has ended; whether it had not."""
        with self._lock:
            if worker not in self._seen_at:
                return False
            self._seen_at[worker] = now
            return True

    def end(self, worker: str) -> None:
        with self._lock:
            self._seen_at.pop(worker, None)

    def expired(self, now: float) -> list[str]:
        """Workers whose lease has run out and has not been ended yet, in worker-id order."""
        return sorted(worker for worker, seen_at in self._seen_at.items() if now - seen_at > self.term_s)

    def remaining_s(self, worker: str, now: float) -> float | None:
        """Until the worker's lease runs out; None where it holds none."""
        seen_at = self._seen_at.get(worker)
        return None if seen_at is None else max(0.0, seen_at + self.term_s - now)

    def last_seen_s(self, worker: str, now: float) -> float | None:
        seen_at = self._seen_at.get(worker)
        return None if seen_at is None else now - seen_at

    def live(self) -> set[str]:
        return set(self._seen_at)

    def __contains__(self, worker: str) -> bool:
        return worker in self._seen_at

    def __len__(self) -> int:
        return len(self._seen_at)
