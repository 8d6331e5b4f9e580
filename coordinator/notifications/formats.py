"""Notifications, and the HTTP request that delivers one: the body in the webhook's format, and the signature.

Headers and signature follow Standard Webhooks (https://www.standardwebhooks.com):

    webhook-id          the notification's id: the same at every attempt, so that a receiver can drop duplicates
    webhook-timestamp   the time of this attempt, in seconds since 1970
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

MAX_CHARACTERS = 1500  # of a message: Discord accepts 2,000 characters, ntfy 4,096 bytes


class Titles(NamedTuple):
    """A notification's titles. `resolved` is empty for kinds that have no end."""

    firing: str
    resolved: str
    priority: int  # ntfy's, 1 to 5


KINDS: dict[str, Titles] = {
    "run-stalled": Titles("run stalled", "no longer stalled", 4),
    "worker-lost": Titles("worker lost", "", 3),
    "divergence": Titles("divergence", "", 4),
    "guard": Titles("the guard reports a spoilt model", "", 5),
    "run-finished": Titles("run finished", "", 3),
    "disk-filling": Titles("disk filling up", "disk has free space again", 5),
    "backup-failed": Titles("backup failed", "backups succeed again", 4),
    "test": Titles("test", "", 3),
}
# Events of runs that are notified -> the kind of notification. Conditions that begin and end are in `alerts.py`.
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
    """A notification to the webhook.

    id       unique; survives restarts
    at       when it happened, in seconds since 1970
    state    "firing" when an alert begins, "resolved" when it ends; None for a kind that has no end
    run      None if it is about the server
    round    the run's round at that time
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
        """A summary in a few words."""
        titles = KINDS[self.kind]
        title = titles.resolved if self.state == "resolved" else titles.firing
        return f"{self.run or 'Outerstep coordinator'}: {title}"


class Request(NamedTuple):
    """An HTTP POST. `body`: JSON."""

    url: str
    headers: dict[str, str]
    body: bytes


def request_of(each: Notification, url: str, format_: str, secret: str | None, now: float) -> Request:
    """Return the request that delivers this notification to the webhook at `url` at time `now`."""
    if len(each.message) > MAX_CHARACTERS:
        each = Notification(**{**vars(each), "message": each.message[: MAX_CHARACTERS - 1] + "…"})
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
    # Escape the three characters that Slack interprets, so that a "<!channel>" in the text alerts no channel.
    title, message = (
        text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") for text in (each.title, each.message)
    )
    return url, {"text": f"*{title}*\n{message}"}


def _discord(each: Notification, url: str) -> tuple[str, Any]:
    return url, {"content": f"**{each.title}**\n{each.message}", "allowed_mentions": {"parse": []}}


def _ntfy(each: Notification, url: str) -> tuple[str, Any]:
    """Build JSON for the server's root; the topic, the last part of the URL, goes into the body."""
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
    """Return a random id for a notification, in the form of Standard Webhooks."""
    return f"msg_{secrets.token_hex(12)}"


def format_of(url: str) -> str:
    """Return the format that the webhook at `url` expects, by its host; "json" for an unknown host."""
    return HOSTS.get(urlsplit(url).hostname or "", "json")
