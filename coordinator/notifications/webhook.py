"""A notification as JSON, sent by one POST to an http(s) URL. Headers and signature follow Standard Webhooks
(https://www.standardwebhooks.com):

    webhook-id          the notification's id
    webhook-timestamp   the time of sending, in seconds since 1970
    webhook-signature   "v1," and the base64 of HMAC-SHA256 over "ID.TIMESTAMP.BODY"; only with a secret
"""

import asyncio
import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime
from urllib.parse import urlsplit

import httpx

from coordinator.notifications.notification import SHOWN_CHARACTERS, DeliveryError, Notification, shown
from outerstep.common.connections import WrongVariable, error_text, keep_urls_out_of_logs, ssl_context

TIMEOUT_S = 15.0  # of the whole request


def request_of(each: Notification, secret: str | None, now: float) -> tuple[dict[str, str], bytes]:
    """Return the headers and body that send this notification at time `now`. `secret`: whsec_ and base64; None: do not
    sign it."""
    data = {key: getattr(each, key) for key in ("state", "run", "worker", "round", "message")}
    at = datetime.fromtimestamp(each.at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    body = json.dumps({"type": each.kind, "timestamp": at, "data": data}, separators=(",", ":")).encode()
    headers = {
        "content-type": "application/json",
        "accept-encoding": "identity",
        "webhook-id": each.id,
        "webhook-timestamp": str(int(now)),
    }
    if secret is not None:
        key = base64.b64decode(secret.removeprefix("whsec_"))
        signature = hmac.digest(key, f"{each.id}.{int(now)}.".encode() + body, hashlib.sha256)
        headers["webhook-signature"] = "v1," + base64.b64encode(signature).decode()
    return headers, body


def send(url: str, secret: str | None, each: Notification, now: float) -> None:
    """Send the notification. Raises DeliveryError."""
    host = urlsplit(url).hostname
    try:
        asyncio.run(_post(url, *request_of(each, secret, now)))
    except TimeoutError as error:
        raise DeliveryError(f"{host}: no answer within {TIMEOUT_S:.0f} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError, WrongVariable) as error:
        raise DeliveryError(f"{host}: {shown(error_text(error), url)}") from error


async def _post(url: str, headers: dict[str, str], body: bytes) -> None:
    keep_urls_out_of_logs()
    async with (
        asyncio.timeout(TIMEOUT_S),  # httpx limits only the time between two bytes
        httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, verify=ssl_context()) as http,
        http.stream("POST", url, content=body, headers=headers) as answer,
    ):
        if answer.is_success:  # its body is not needed
            return
        chunk = await anext(aiter(answer.aiter_raw()), b"")  # the first one is enough
    reason = (
        "redirects are not followed" if answer.is_redirect else chunk[: 4 * SHOWN_CHARACTERS].decode(errors="replace")
    )
    raise DeliveryError(f"{answer.url.host} answered {answer.status_code}: {shown(reason, url)}")
