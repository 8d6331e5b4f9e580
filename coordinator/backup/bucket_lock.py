"""A lock in a bucket: the object `lock` names the process that holds the lock, and until when.

The lock is taken and renewed by conditional puts, so only one of two concurrent attempts succeeds. A killed process
does not release it: another process may take it once it has been expired for CLOCKS_S seconds, because clocks differ.
The holder renews it every RENEW_S seconds on a separate thread, because a part may take long to upload. Removing
objects could harm another backup, so the holder does it only while at least MARGIN_S seconds remain.
"""

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from pydantic import ValidationError

from coordinator.backup.manifest import Frozen
from outerstep.common.objects import Objects, Version
from protocol.errors import OuterstepError

logger = logging.getLogger(__name__)

PATH = "lock"
LEASE_S, RENEW_S, MARGIN_S, CLOCKS_S = 600.0, 60.0, 180.0, 60.0
_TRIES = 3


class LockContent(Frozen):
    """The content of the lock. `until`: seconds since 1970; 0 once it was released."""

    holder: str
    id: str
    until: float


class LockLost(OuterstepError):
    """Another process has the lock, or may have it."""


class BucketLock:
    """The lock of a backup store, held for one backup."""

    def __init__(self, objects: Objects, now: Callable[[], float]) -> None:
        self._objects, self._now = objects, now
        self._id = secrets.token_hex(16)
        self._lock = threading.Lock()  # guards the fields below
        self._version: Version = {}
        self._until = 0.0
        self._gone = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock during the block. Raises OuterstepError if another process has it, or if the store ignores
        conditional puts."""
        self._take()
        over = threading.Event()
        beat = threading.Thread(target=self._renew_until, args=(over,), name="backup-lock", daemon=True)
        beat.start()
        try:
            self._check_conditions()
            yield
        finally:
            over.set()
            beat.join()
            self._release()

    def check(self) -> None:
        """Raise LockLost unless the lock is held for at least MARGIN_S more seconds."""
        with self._lock:
            if self._gone:
                raise LockLost(
                    f"another backup has taken the lock {self._objects.name(PATH)}, because this one was suspended for "
                    "too long: repeat the command"
                )
            if self._until - self._now() < MARGIN_S:
                raise LockLost(
                    f"the lock {self._objects.name(PATH)} could not be renewed in time, so another backup may have "
                    "it: repeat the command"
                )

    def renew(self) -> None:
        """Extend the lock to LEASE_S seconds from now. Raises LockLost if another process has it; may raise
        Transient."""
        with self._lock:
            until = self._now() + LEASE_S
            if self._put(until):
                self._until = until
            else:
                self._gone = True
        self.check()

    def _take(self) -> None:
        until = self._now() + LEASE_S
        content = self._content(until)
        for _ in range(_TRIES):
            found = self._objects.get(PATH)
            if found is None:
                version = self._objects.create(PATH, content)
            elif found[0] == content:  # our put has succeeded; only the answer was lost
                version = found[1]
            else:
                self._check_free(found[0])
                version = self._objects.replace(PATH, content, found[1])
            if version is not None:
                self._version, self._until = version, until
                return
        raise OuterstepError(f"other backups keep taking the lock {self._objects.name(PATH)}: try again later")

    def _check_conditions(self) -> None:
        """Raise OuterstepError if the store allows the lock to be created a second time. The check uses the same
        content."""
        with self._lock:
            version = self._objects.create(PATH, self._content(self._until))
        if version is not None:
            self._version = version
            raise OuterstepError(
                f"the store of {self._objects} ignores `If-None-Match`, so concurrent backups could harm each other: "
                "use a store that supports it, or a directory"
            )

    def _check_free(self, content: bytes) -> None:
        """Raise OuterstepError if the lock with this content is held."""
        try:
            held = LockContent.model_validate_json(content)
        except ValidationError as error:
            raise OuterstepError(
                f"{self._objects.name(PATH)} is not a lock of Outerstep: use another prefix, or delete it if corrupt"
            ) from error
        if held.until + CLOCKS_S > self._now():
            until = datetime.fromtimestamp(held.until + CLOCKS_S, UTC)
            raise OuterstepError(
                f"another backup is being made in {self._objects}, by {held.holder}: wait until it is done. If it was "
                f"killed, a backup started after {until:%Y-%m-%d %H:%M:%S} UTC takes over"
            )

    def _renew_until(self, over: threading.Event) -> None:
        while not over.wait(RENEW_S):
            try:
                self.renew()
            except LockLost as error:
                logger.error("%s", error)
                if self._gone:
                    return
            except OuterstepError as error:  # a retry may succeed; `check` raises once the time is too short
                logger.warning("the lock of a backup cannot be renewed: %s", error)

    def _release(self) -> None:
        """Release the lock. If this fails, the next backup has to wait until it expires."""
        try:
            if not self._gone:
                self._put(0.0)
        except OuterstepError as error:
            logger.warning("the lock cannot be released, so the next backup has to wait: %s", error)

    def _put(self, until: float) -> bool:
        """Write the expiry into the lock. Return False if another process has it."""
        content = self._content(until)
        version = self._objects.replace(PATH, content, self._version)
        # If the answer to this put or an earlier one was lost, the lock is ours but has a version that we do not know.
        if version is None and (found := self._objects.get(PATH)) is not None and self._id.encode() in found[0]:
            version = found[1] if found[0] == content else self._objects.replace(PATH, content, found[1])
        if version is None:
            return False
        self._version = version
        return True

    def _content(self, until: float) -> bytes:
        held = LockContent(holder=f"{socket.gethostname()}, process {os.getpid()}", id=self._id, until=until)
        return held.model_dump_json().encode() + b"\n"
