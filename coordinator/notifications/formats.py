"""What a webhook is sent: the notification, the body in its receiver's format, and the signature.

Headers and signature follow Standard Webhooks (https://www.standardwebhooks.com):

    webhook-id          the notification's id: the same at every attempt, so a receiver can drop what comes twice
    webhook-timestamp   seconds since 1970, of this attempt
    webhook-signature   "v1," and the base64 of HMAC-SHA256 over "ID.TIMESTAMP.BODY"; only with a secret
"""

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

MOST_CHARACTERS = 1500  # of a message: Discord takes 2,000, ntfy 4,096 bytes


class Words(NamedTuple):
    """How a kind of notification is titled. `resolved`: empty where it has no end."""

    firing: str
    resolved: str
    priority: int  # ntfy's, 1 to 5


KINDS: dict[str, Words] = {
    "run-stalled": Words("run stalled", "no longer stalled", 4),
    "worker-lost": Words("worker lost", "", 3),
    "divergence": Words("divergence", "", 4),
    "guard": Words("the guard reports a spoilt model", "", 5),
    "run-finished": Words("run finished", "", 3),
    "disk-filling": Words("disk filling up", "disk has room again", 5),
    "backup-failed": Words("backup failed", "backups are made again", 4),
    "test": Words("test", "", 3),
}
# The events of runs that are notified. What begins and ends is in `watching.py`.
OF_EVENTS = {
    "lost": "worker-lost",
    "diverged": "divergence",
    "evaluations-differ": "divergence",
    "suspected": "divergence",
    "spoilt": "guard",
    "finished": "run-finished",
}


@dataclass(frozen=True)
class Notification:
    """What a webhook is notified of.

    id       unique, and kept over restarts
    at       when it happened, in seconds since 1970
    state    "firing" when something begins, "resolved" when it ends; None if it has no end
    run      None if it is about the server
    round    the run's, when it was made
    """

    id: str
    at: float
    kind: str
    message: str
    state: str | None = None
    run: str | None = None
    worker: str | None = None
    round: int | None = None

    @property
    def title(self) -> str:
        """What happened, in a few words."""
        words = KINDS[self.kind]
        said = words.resolved if self.state == "resolved" else words.firing
        return f"{self.run or 'Outerstep coordinator'}: {said}"


class Request(NamedTuple):
    """An HTTP POST. `body`: JSON."""

    url: str
    headers: dict[str, str]
    body: bytes


def request_of(each: Notification, url: str, format_: str, secret: str | None, now: float) -> Request:
    """Return what is sent to the webhook at `url` at time `now`."""
    if len(each.message) > MOST_CHARACTERS:
        each = Notification(**{**vars(each), "message": each.message[: MOST_CHARACTERS - 1] + "…"})
    url, document = FORMATS[format_](each, url)
    body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    timestamp = str(int(now))
    headers = {
        "content-type": "application/json",
        "accept-encoding": "identity",
        "webhook-id": each.id,
        "webhook-timestamp": timestamp,
    }
    if secret is not None:
        headers["webhook-signature"] = sign(secret, each.id, timestamp, body)
    return Request(url, headers, body)


def sign(secret: str, id_: str, timestamp: str, body: bytes) -> str:
    """Return the signature. `secret`: whsec_ and base64."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = f"{id_}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()


def _json(each: Notification, url: str) -> tuple[str, Any]:
    data = {key: getattr(each, key) for key in ("state", "run", "worker", "round", "message")}
    timestamp = datetime.fromtimestamp(each.at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return url, {"type": each.kind, "timestamp": timestamp, "data": data}


def _slack(each: Notification, url: str) -> tuple[str, Any]:
    # Slack's own three escapes: a "<!channel>" in somebody's words calls nobody.
    title, message = (
        text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") for text in (each.title, each.message)
    )
    return url, {"text": f"*{title}*\n{message}"}


def _discord(each: Notification, url: str) -> tuple[str, Any]:
    return url, {"content": f"**{each.title}**\n{each.message}", "allowed_mentions": {"parse": []}}


def _ntfy(each: Notification, url: str) -> tuple[str, Any]:
    """JSON is published at the server's root; the topic, the last part of the URL, goes into the body."""
    parts = urlsplit(url)
    root, _, topic = parts.path.rstrip("/").rpartition("/")
    resolved = each.state == "resolved"
    document = {
        "topic": topic,
        "title": each.title,
        "message": each.message,
        "priority": 3 if resolved else KINDS[each.kind].priority,
        "tags": ["white_check_mark" if resolved or each.kind in ("run-finished", "test") else "warning"],
    }
    return urlunsplit(parts._replace(path=f"{root}/")), document


FORMATS: dict[str, Callable[[Notification, str], tuple[str, Any]]] = {
    "json": _json,
    "slack": _slack,
    "discord": _discord,
    "ntfy": _ntfy,
}
HOSTS = {"hooks.slack.com": "slack", "discord.com": "discord", "discordapp.com": "discord", "ntfy.sh": "ntfy"}


def new_id() -> str:
    """Return a random id for a notification, as Standard Webhooks has them."""
    return f"msg_{secrets.token_hex(12)}"


def format_of(url: str) -> str:
    """Return the format that the webhook at `url` expects, as far as its host says."""
    return HOSTS.get(urlsplit(url).hostname or "", "json")
