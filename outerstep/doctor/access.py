"""The token: whether it is valid, and lets a worker join, found out by reading."""

from enum import Enum, auto

from outerstep import rest
from outerstep.doctor.finding import Finding, fine, warning, wrong
from protocol.errors import Problem


class Access(Enum):
    WORKER = auto()
    ADMIN = auto()
    READING = auto()  # a viewer's, or a member's
    NONE = auto()


_REFUSALS = {"unauthorized": Access.NONE, "forbidden": Access.READING}


def look(client: rest.Client) -> Access:
    """Raises what `rest.Client` does, but for what says something of the token."""
    try:
        client.line_check_down(0)  # for whoever may join
    except Problem as problem:
        if problem.slug not in _REFUSALS:
            raise
        return _REFUSALS[problem.slug]
    try:
        next(iter(client.tokens()), None)
    except Problem as problem:
        if problem.slug == "forbidden":
            return Access.WORKER
        raise
    return Access.ADMIN


_NEW = "have an admin make one: outerstep token create --scope join"


def judge(seen: Access) -> list[Finding]:
    match seen:
        case Access.WORKER:
            return [fine("token", "valid, and lets workers join")]
        case Access.ADMIN:
            said = "valid, but an admin's: whoever reads it on this box may stop runs and make tokens"
            return [warning("token", said, f"the box needs a join or worker token only; {_NEW}")]
        case Access.READING:
            return [wrong("token", "valid, but for reading only: it does not let workers join", _NEW)]
        case Access.NONE:
            return [wrong("token", "the coordinator does not know it, or it was revoked", _NEW)]
