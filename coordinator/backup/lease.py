"""A lock in a bucket: the object `lock`, which says who holds it and until when.

It is taken and renewed by conditional puts, so that of two at once one alone succeeds. Who was killed does not give it
back: once its time is over, and CLOCKS_S more as clocks differ, another takes it. Who holds it renews it every RENEW_S,
on a thread of its own, as a part may be under way for long; and begins nothing that could harm another, which is the
removal of an object, unless MARGIN_S of it remain.
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

from coordinator.backup.manifest import Part
from coordinator.backup.objects import Objects, Version
from protocol.errors import OuterstepError

logger = logging.getLogger(__name__)

PATH = "lock"
LEASE_S, RENEW_S, MARGIN_S, CLOCKS_S = 600.0, 60.0, 180.0, 60.0
_TRIES = 3


class Held(Part):
    """What is in the lock. `until` in seconds since 1970: 0 once it was given back."""

    holder: str
    id: str
    until: float


class Lost(OuterstepError):
    """Another has the lock, or may have it."""


class Lease:
    """The lock of a place of backups, for one backup."""

    def __init__(self, objects: Objects, now: Callable[[], float]) -> None:
        self._objects, self._now = objects, now
        self._id = secrets.token_hex(16)
        self._lock = threading.Lock()  # around what follows
        self._version: Version = {}
        self._until = 0.0
        self._gone = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock. Raises OuterstepError if another does, or if the store heeds no conditions."""
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
            self._give_back()

    def check(self) -> None:
        """Raise Lost unless the lock is held for MARGIN_S more."""
        with self._lock:
            if self._gone:
                raise Lost(
                    f"another backup has taken the lock {self._objects.name(PATH)}, as this one was held up for long: "
                    "do the same again"
                )
            if self._until - self._now() < MARGIN_S:
                raise Lost(
                    f"the lock {self._objects.name(PATH)} could not be renewed in time, so another may have it: do the "
                    "same again"
                )

    def renew(self) -> None:
        """Hold the lock for LEASE_S from now on. Raises Lost if another has it, and Transient."""
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
            elif found[0] == content:  # the answer to the put was lost
                version = found[1]
            else:
                self._check_free(found[0])
                version = self._objects.replace(PATH, content, found[1])
            if version is not None:
                self._version, self._until = version, until
                return
        raise OuterstepError(f"others take the lock {self._objects.name(PATH)} all the time: try again")

    def _check_conditions(self) -> None:
        """Raise OuterstepError if the store makes the lock a second time: what it holds is the same."""
        with self._lock:
            version = self._objects.create(PATH, self._content(self._until))
        if version is not None:
            self._version = version
            raise OuterstepError(
                f"the store of {self._objects} heeds no `If-None-Match`, so two backups at once could harm each other: "
                "name one that does, or a directory"
            )

    def _check_free(self, content: bytes) -> None:
        """Raise OuterstepError if the lock with this content is somebody's."""
        try:
            held = Held.model_validate_json(content)
        except ValidationError as error:
            raise OuterstepError(
                f"{self._objects.name(PATH)} is no lock of Outerstep: name another prefix, or delete it if it is spoilt"
            ) from error
        if held.until + CLOCKS_S > self._now():
            until = datetime.fromtimestamp(held.until + CLOCKS_S, UTC)
            raise OuterstepError(
                f"another backup is being made in {self._objects}, by {held.holder}: wait until it is done; if it was "
                f"killed, a backup after {until:%Y-%m-%d %H:%M:%S} UTC takes over"
            )

    def _renew_until(self, over: threading.Event) -> None:
        while not over.wait(RENEW_S):
            try:
                self.renew()
            except Lost as error:
                logger.error("%s", error)
                if self._gone:
                    return
            except OuterstepError as error:  # another try may mend it, and `check` knows until when
                logger.warning("the lock of a backup cannot be renewed: %s", error)

    def _give_back(self) -> None:
        """Let another take the lock at once; where this fails, it waits."""
        try:
            if not self._gone:
                self._put(0.0)
        except OuterstepError as error:
            logger.warning("the next backup has to wait, as the lock cannot be given back: %s", error)

    def _put(self, until: float) -> bool:
        """Write into the lock until when it is held; return False if it is another's."""
        content = self._content(until)
        version = self._objects.replace(PATH, content, self._version)
        # The answer to this put, or to one before, may have been lost: then the lock is this one's, in another version.
        if version is None and (found := self._objects.get(PATH)) is not None and self._id.encode() in found[0]:
            version = found[1] if found[0] == content else self._objects.replace(PATH, content, found[1])
        if version is None:
            return False
        self._version = version
        return True

    def _content(self, until: float) -> bytes:
        held = Held(holder=f"{socket.gethostname()}, process {os.getpid()}", id=self._id, until=until)
        return held.model_dump_json().encode() + b"\n"
