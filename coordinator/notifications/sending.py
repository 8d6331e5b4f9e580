"""Delivery of notifications to the webhook, by a separate task that no round waits for.

A failed notification is retried for three days, with exponential backoff and jitter. If the webhook itself fails (no
answer, 5xx, 429), all notifications wait; if it rejects one notification, the next one is sent.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

import httpx
from pydantic import SecretStr

from coordinator.logs import scrubbed
from coordinator.notifications.formats import Notification, Request, format_of, new_id, request_of
from coordinator.notifications.outbox import Outbox, Pending
from outerstep.common.connections import WrongVariable, error_text, keep_urls_out_of_logs, ssl_context
from protocol.errors import OuterstepError
from protocol.text import printable

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 3600.0
GIVE_UP_S = 3 * 86_400.0
TIMEOUT_S = 15.0  # of one attempt
LOG_EVERY_S = 600.0  # for an error that persists
SHOWN_CHARACTERS = 200  # of the webhook's answer
_RETRYABLE = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)

Open = Callable[[], httpx.AsyncClient]


@dataclass(frozen=True)
class Webhook:
    """A webhook: its URL, the format that it expects, and the secret that notifications are signed with."""

    url: SecretStr
    format: str
    secret: SecretStr | None = None

    @property
    def host(self) -> str:
        """Its host name. The rest of the URL may be secret."""
        return urlsplit(self.url.get_secret_value()).hostname or ""

    @property
    def secrets(self) -> Iterable[str]:
        """Texts that must never be shown."""
        url = self.url.get_secret_value()
        parts = urlsplit(url)
        path = parts.path.strip("/")
        return [url, path, path.rpartition("/")[2], parts.query, parts.password or ""]


class DeliveryError(OuterstepError):
    """The webhook did not accept a notification. `retry_after_s`: from its Retry-After header. `for_all`: it would not
    accept any other notification either."""

    def __init__(self, why: str, *, retry_after_s: float = 0.0, for_all: bool = True) -> None:
        super().__init__(why)
        self.retry_after_s, self.for_all = retry_after_s, for_all


def webhook_of(url: SecretStr | None, format_: str | None, secret: SecretStr | None) -> Webhook | None:
    """Return the webhook described by the settings; None if they have none."""
    return None if url is None else Webhook(url, format_ or format_of(url.get_secret_value()), secret)


def new_client() -> httpx.AsyncClient:
    """Return an HTTP client for one attempt. It follows no redirects. Raises WrongVariable."""
    keep_urls_out_of_logs()
    return httpx.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, verify=ssl_context())


async def send(webhook: Webhook, each: Notification, now: float, open_: Open = new_client) -> int:
    """Send a notification once; return the response's status. Raises DeliveryError."""
    secret = None if webhook.secret is None else webhook.secret.get_secret_value()
    request = request_of(each, webhook.url.get_secret_value(), webhook.format, secret, now)
    try:
        async with asyncio.timeout(TIMEOUT_S), open_() as http:
            return await _post(http, request, webhook)
    except TimeoutError as error:
        raise DeliveryError(f"{webhook.host}: no answer within {TIMEOUT_S:.0f} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError, WrongVariable) as error:
        raise DeliveryError(f"{webhook.host}: {scrubbed(error_text(error), webhook.secrets)}") from error


def send_test(webhook: Webhook) -> int:
    """Send a test notification once; return the response's status. Raises DeliveryError."""
    now = time.time()
    message = "This is a test: this coordinator's notifications arrive here."
    return asyncio.run(send(webhook, Notification(new_id(), now, "test", message), now))


async def _post(http: httpx.AsyncClient, request: Request, webhook: Webhook) -> int:
    async with http.stream("POST", request.url, content=request.body, headers=request.headers) as answer:
        if answer.is_success:  # its body is not needed
            return answer.status_code
        content = b""
        async for chunk in answer.aiter_raw():
            content = chunk[: 4 * SHOWN_CHARACTERS]  # the first chunk is enough
            break
    text = printable(" ".join(content.decode(errors="replace").split()))
    status = answer.status_code
    why = f"{webhook.host} answered {status} {answer.reason_phrase}".rstrip()
    if answer.is_redirect:
        why += ": redirects are not followed; configure the URL that it redirects to"
    elif text:
        why += f": {scrubbed(text, webhook.secrets)[:SHOWN_CHARACTERS]}"
    retry_after = answer.headers.get("retry-after", "")
    retry_after_s = min(float(retry_after), LONGEST_PAUSE_S) if retry_after.isdigit() else 0.0
    for_all = not answer.is_client_error or status in _RETRYABLE
    raise DeliveryError(why, retry_after_s=retry_after_s, for_all=for_all)


class Sender:
    """Sends the notifications in the outbox. One task calls `deliver_due` about once a second.

    `draw` returns random numbers in [0, 1); `open_` returns an HTTP client.
    """

    def __init__(
        self,
        webhook: Webhook,
        outbox: Outbox,
        clock: Callable[[], float],
        now: Callable[[], float],
        draw: Callable[[], float],
        open_: Open = new_client,
    ) -> None:
        self.webhook, self.outbox = webhook, outbox
        self._clock, self._now, self._draw, self._open = clock, now, draw, open_
        self.sent = 0
        self.failed = 0  # number of failed attempts
        self.sent_at: float | None = None  # when the last one was sent; this and `failed_at` in seconds since 1970
        self.failed_at: float | None = None
        self.fault = ""  # why the last attempt failed; empty if it succeeded
        self._held_until = -float("inf")
        self._logged_at = -float("inf")

    async def deliver_due(self) -> None:
        """Send the notifications that are due, oldest first. Stops if the webhook itself fails."""
        if self._clock() < self._held_until:
            return
        for each in self.outbox.pending:
            if each.due <= self._clock() and not await self._attempt(each):
                return

    async def _attempt(self, each: Pending) -> bool:
        """Try to send one notification. Return False if the others must wait."""
        try:
            await send(self.webhook, each.notification, self._now(), self._open)
        except DeliveryError as error:
            await self._note_failure(each, error)
            return not error.for_all
        if self.fault:
            logger.info("notifications are delivered to %s again", self.webhook.host)
        self.sent, self.sent_at, self.fault = self.sent + 1, self._now(), ""
        self._logged_at = -float("inf")
        await asyncio.to_thread(self.outbox.done, each.notification.id)
        return True

    async def _note_failure(self, each: Pending, error: DeliveryError) -> None:
        each.attempts += 1
        each.due = self._clock() + max(error.retry_after_s, pause_s(each.attempts, self._draw()))
        if error.for_all:
            self._held_until = each.due
        self.failed, self.failed_at, self.fault = self.failed + 1, self._now(), str(error)
        if self._clock() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = self._clock()
            logger.warning("a notification was not delivered: %s; retrying", error)
        if self._clock() - each.since > GIVE_UP_S:
            await asyncio.to_thread(self.outbox.give_up, each.notification.id)


def pause_s(attempts: int, drawn: float) -> float:
    """Return the seconds to wait after `attempts` failed attempts. `drawn`: a random number in [0, 1)."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(attempts - 1, 20)) * (0.5 + drawn / 2))
