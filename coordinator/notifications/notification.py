"""A notification, and which events of a run become one."""

import re
import secrets
from dataclasses import dataclass, field
from urllib.parse import unquote

from coordinator.process import scrubbed
from protocol.errors import OuterstepError
from protocol.text import printable

SHOWN_CHARACTERS = 200  # of a receiver's answer
# Events of runs -> the kind of notification. `alerts.py` has conditions that begin and end.
EVENT_KINDS = {
    "lost": "worker-lost",
    "diverged": "divergence",
    "evaluations-differ": "divergence",
    "redone": "divergence",
    "suspected": "divergence",
    "spoilt": "guard",
    "finished": "run-finished",
}


@dataclass(frozen=True)
class Notification:
    """`at`: when it happened, in seconds since 1970. `state`: "firing" when an alert begins, "resolved" when it ends;
    None for an event. `run`: None if it is about the server. `round`: the run's round at that time."""

    kind: str
    at: float
    message: str
    state: str | None = None
    run: str | None = None
    worker: str | None = None
    round: int | None = None
    id: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")


class DeliveryError(OuterstepError):
    """A receiver did not accept a notification."""


def shown(text: str, url: str) -> str:
    """Return what a receiver or a library said, on one line and without any part of the receiver's URL."""
    after_scheme = url.partition("://")[2]
    parts = re.split(r"[/:@?&=,]+", f"{after_scheme}/{unquote(after_scheme)}")
    return printable(scrubbed(" ".join(text.split()), parts))[:SHOWN_CHARACTERS]
