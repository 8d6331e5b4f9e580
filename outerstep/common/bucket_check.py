"""Checks of a bucket: whether it keeps what a coordinator relies on. They create one small object and remove it, also
after a fault if the store allows that.

Stores differ. Some gateways accept a second conditional create silently; then an acknowledged contribution could be
replaced by other bytes.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from outerstep.common.objects import Objects
from outerstep.common.quantities import duration_text
from protocol.errors import OuterstepError, Transient

FOLDER = "check"
SKEW_S = 60.0  # between the clocks of this machine and the store, before it is reported
_CONTENT, _OTHER = b"an object of a check", b"another object"


@dataclass(frozen=True)
class BucketFinding:
    """The result of one check. `fault`: what is wrong, for the operator; None if it is fine. `passing`: it may be fine
    later."""

    name: str
    said: str
    fault: str | None = None
    passing: bool = False


def check_bucket(objects: Objects, now: Callable[[], float] = time.time) -> Iterator[BucketFinding]:
    """Check the bucket, and yield a finding after each check. Ends after the first fault."""
    path = f"{FOLDER}/{secrets.token_hex(8)}"
    for name, look in (
        ("write", lambda: _create(objects, path)),
        ("create once", lambda: _create_once(objects, path)),
        ("read", lambda: _read(objects, path)),
        ("list", lambda: _list(objects, path)),
        ("clock", lambda: _clock(objects, path, now)),
        ("remove", lambda: _remove(objects, path)),
    ):
        finding = _finding(name, look, objects.name(path))
        if finding.fault is not None and name != "write":  # then there may be an object
            with suppress(OuterstepError):
                objects.delete([path])
        yield finding
        if finding.fault is not None:
            return


def _finding(name: str, look: Callable[[], str], probe: str) -> BucketFinding:
    try:
        return BucketFinding(name, look())
    except _Unfit as error:
        return BucketFinding(name, "", str(error))
    except FileNotFoundError:
        return BucketFinding(name, "", f"{probe} was just created, but the store does not have it")
    except OuterstepError as error:
        return BucketFinding(name, "", str(error), passing=isinstance(error, Transient))


class _Unfit(Exception):
    """The store does not do what a coordinator relies on; the message says what."""


def _create(objects: Objects, path: str) -> str:
    if not objects.create_from(path, _CONTENT):
        raise _Unfit(f"{objects.name(path)} exists already, although nobody has created it")
    return f"{objects} can be written"


def _create_once(objects: Objects, path: str) -> str:
    created = objects.create_from(path, _OTHER)
    if created or objects.read(path, 0, len(_CONTENT)) != _CONTENT:
        raise _Unfit(
            f"the store of {objects} has replaced an object that must only be created if there is none: it ignores "
            "If-None-Match, so it could lose acknowledged work. Use another store, or a later version of this one"
        )
    return "an object is never replaced"


def _read(objects: Objects, path: str) -> str:
    if objects.read(path, 3, 9) != _CONTENT[3:9] or objects.size(path) != len(_CONTENT):
        raise _Unfit(f"the store of {objects} answers with other bytes than were written")
    return "ranges can be read"


def _list(objects: Objects, path: str) -> str:
    folder, _, name = path.partition("/")
    if (name, len(_CONTENT)) not in set(objects.within(folder)):
        raise _Unfit(f"the list of {objects.name(folder)} lacks an object that was just created")
    return "new objects are listed"


def _clock(objects: Objects, path: str, now: Callable[[], float]) -> str:
    skew_s = objects.modified_at(path) - now()
    if abs(skew_s) > SKEW_S:
        ahead = "behind" if skew_s > 0 else "ahead of"
        raise _Unfit(
            f"this machine's clock is {duration_text(abs(skew_s))} {ahead} the store's: set it, because stores refuse "
            "requests whose time is wrong"
        )
    return f"this machine and the store agree on the time, to {max(1.0, abs(skew_s)):.0f} s"


def _remove(objects: Objects, path: str) -> str:
    objects.delete([path])
    if objects.size(path) is not None:
        raise _Unfit(f"{objects.name(path)} was removed, but is still there")
    return "objects can be removed"
