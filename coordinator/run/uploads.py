"""The blobs of a run's contributions before their rows are committed: one owner for each while it is uploaded, deleted,
or may be uploaded to the store by its worker.

A contribution's name contains the digest of its bytes, so several requests may upload the same blob at once. If the
contribution is rejected, the last of them deletes it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coordinator.store.blobs import Blobs
from protocol.errors import Problem


@dataclass(frozen=True)
class _Grant:
    """An upload to the store that a worker may still make: of `size` bytes, begun before `until` (of the clock)."""

    worker: str
    size: int
    until: float


class Uploads:
    """The uploads of a run. `lock`: the run's; `clock`: in seconds."""

    def __init__(self, lock: threading.RLock, blobs: Blobs, clock: Callable[[], float]) -> None:
        self._lock, self._blobs, self._clock = lock, blobs, clock
        self._requests: Counter[str] = Counter()  # by blob: how many are uploading it
        self._vanished: set[str] = set()  # blobs that were deleted or moved while they were being uploaded
        self._deleting: set[str] = set()
        self._granted: dict[str, _Grant] = {}  # by blob: not committed yet

    @contextmanager
    def begin(self, name: str, is_accepted: Callable[[], bool]) -> Iterator[None]:
        """Let the block create the blob `name` and commit its row. Unless the row is there afterwards (`is_accepted`),
        delete the blob, without the lock: the last of several requests does, unless the store has not shown it yet.
        Raises Problem `not-ready` while it is deleted."""
        with self._lock:
            self._check_not_deleting(name)
            self._requests[name] += 1
        uploaded = True
        try:
            yield
        except Problem as problem:
            uploaded = problem.slug != "not-uploaded"
            raise
        finally:
            with self._lock:
                self._requests[name] -= 1
                last = not self._requests[name]
                if last:
                    del self._requests[name]
                    self._vanished.discard(name)
                leftover = last and uploaded and not is_accepted()
                if leftover:
                    self._deleting.add(name)
            if leftover:
                self._delete([name])

    def check_present(self, name: str) -> None:
        """Raise Problem if the blob was deleted or moved while it was being uploaded. Call it under the lock."""
        if name in self._vanished:
            raise Problem("not-ready", "the blob vanished during the upload; resend it", retry_after_s=1)

    def note_vanished(self, *names: str) -> None:
        """Record that blobs are deleted or moved: uploads of them must not be accepted. Call it under the lock."""
        self._vanished.update(name for name in names if name in self._requests)

    def grant(self, name: str, worker: str, size: int, expires_s: float, *, most: int) -> None:
        """Let a worker upload the blob to the store itself, beginning within `expires_s`. Raises Problem if it would
        have been granted more than `most` bytes that it has not committed."""
        with self._lock:
            self._check_not_deleting(name)
            others = (each for other, each in self._granted.items() if other != name)
            granted = sum(each.size for each in others if each.worker == worker)
            if granted + size > most:
                detail = f"{worker} has been granted uploads of {granted} bytes and has not committed them"
                raise Problem("too-many-requests", detail, retry_after_s=expires_s)
            self._granted[name] = _Grant(worker, size, self._clock() + expires_s)

    def end_grant(self, name: str) -> None:
        """The granted upload is committed."""
        with self._lock:
            self._granted.pop(name, None)

    def end_expired(self, left_s: float) -> Callable[[], None] | None:
        """End the grants of uploads that should have begun `left_s` ago and are not committed. Return what deletes
        their blobs, to be called on another thread; None if there are none."""
        until = self._clock() - left_s
        if not any(each.until < until for each in list(self._granted.values())):
            return None
        with self._lock:
            names = [
                name
                for name, each in self._granted.items()
                if each.until < until and name not in self._requests and name not in self._deleting
            ]
            self._deleting.update(names)
            for name in names:
                del self._granted[name]
        return lambda: self._delete(names)

    @property
    def deleting(self) -> bool:
        """True while blobs are deleted."""
        return bool(self._deleting)

    def _delete(self, names: list[str]) -> None:
        try:
            self._blobs.delete(*names)
        finally:
            with self._lock:
                self._deleting.difference_update(names)

    def _check_not_deleting(self, name: str) -> None:
        if name in self._deleting:
            raise Problem("not-ready", "an upload of the same bytes is being deleted", retry_after_s=1)
