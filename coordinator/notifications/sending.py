"""The sending of notifications, by a separate task that no round waits for.

What the receiver does not take is sent again, after pauses that double and are drawn at random, for three days. Where
the receiver itself is at fault (no answer, 5xx, 429) all wait; where it refuses one notification the next goes on.
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
from outerstep.common.connections import error_text
from protocol.errors import OuterstepError
from protocol.text import printable

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 3600.0
GIVE_UP_S = 3 * 86_400.0
DEADLINE_S = 15.0  # of one attempt
LOG_EVERY_S = 600.0  # of an error that lasts
SHOWN_CHARACTERS = 200  # of what the receiver says
_WAITS = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)

Open = Callable[[], httpx.AsyncClient]


@dataclass(frozen=True)
class Receiver:
    """A webhook: where it is, what it expects, and what it is signed with."""

    url: SecretStr
    format: str
    secret: SecretStr | None = None

    @property
    def host(self) -> str:
        """Its name. All else of the URL may be a secret."""
        return urlsplit(self.url.get_secret_value()).hostname or ""

    @property
    def secrets(self) -> Iterable[str]:
        """What must be shown nowhere."""
        url = self.url.get_secret_value()
        parts = urlsplit(url)
        path = parts.path.strip("/")
        return [url, path, path.rpartition("/")[2], parts.query, parts.password or ""]


class NotTaken(OuterstepError):
    """The receiver did not take a notification. `retry_after_s`: what it asks for; `waits`: it would take no other."""

    def __init__(self, why: str, *, retry_after_s: float = 0.0, waits: bool = True) -> None:
        super().__init__(why)
        self.retry_after_s, self.waits = retry_after_s, waits


def receiver_of(url: SecretStr | None, format_: str | None, secret: SecretStr | None) -> Receiver | None:
    """Return the receiver that the settings name; None if there is none."""
    return None if url is None else Receiver(url, format_ or format_of(url.get_secret_value()), secret)


def connection() -> httpx.AsyncClient:
    """Return a connection for one attempt, which follows no redirect."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else it logs the URL, which is a secret
    return httpx.AsyncClient(timeout=DEADLINE_S, follow_redirects=False)


async def send(receiver: Receiver, each: Notification, now: float, open_: Open = connection) -> int:
    """Send a notification once; return the status of the answer. Raises NotTaken."""
    secret = None if receiver.secret is None else receiver.secret.get_secret_value()
    request = request_of(each, receiver.url.get_secret_value(), receiver.format, secret, now)
    try:
        async with asyncio.timeout(DEADLINE_S), open_() as http:
            return await _post(http, request, receiver)
    except TimeoutError as error:
        raise NotTaken(f"{receiver.host}: no answer in {DEADLINE_S:.0f} s") from error
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
        raise NotTaken(f"{receiver.host}: {scrubbed(error_text(error), receiver.secrets)}") from error


def send_test(receiver: Receiver) -> int:
    """Send a test once; return the status of the answer. Raises NotTaken."""
    now = time.time()
    message = "This is a test: notifications of this coordinator arrive here."
    return asyncio.run(send(receiver, Notification(new_id(), now, "test", message), now))


async def _post(http: httpx.AsyncClient, request: Request, receiver: Receiver) -> int:
    async with http.stream("POST", request.url, content=request.body, headers=request.headers) as answer:
        if answer.is_success:  # its body does not matter, so it is not read
            return answer.status_code
        said = b""
        async for chunk in answer.aiter_raw():
            said = chunk[: 4 * SHOWN_CHARACTERS]  # the first piece is enough
            break
    text = printable(" ".join(said.decode(errors="replace").split()))
    status = answer.status_code
    why = f"{receiver.host} answered {status} {answer.reason_phrase}".rstrip()
    if answer.is_redirect:
        why += ": redirects are not followed; set the URL that it leads to"
    elif text:
        why += f": {scrubbed(text, receiver.secrets)[:SHOWN_CHARACTERS]}"
    asked = answer.headers.get("retry-after", "")
    retry_after_s = min(float(asked), LONGEST_PAUSE_S) if asked.isdigit() else 0.0
    waits = not answer.is_client_error or status in _WAITS
    raise NotTaken(why, retry_after_s=retry_after_s, waits=waits)


class Sender:
    """Sends what is in the outbox. `deliver_due` is called about once a second, by one task.

    `draw` gives numbers in [0, 1); `open_` opens a connection.
    """

    def __init__(
        self,
        receiver: Receiver,
        outbox: Outbox,
        clock: Callable[[], float],
        now: Callable[[], float],
        draw: Callable[[], float],
        open_: Open = connection,
    ) -> None:
        self.receiver, self.outbox = receiver, outbox
        self._clock, self._now, self._draw, self._open = clock, now, draw, open_
        self.sent = 0
        self.failed = 0  # attempts
        self.sent_at: float | None = None  # the last one, like the next in seconds since 1970
        self.failed_at: float | None = None
        self.fault = ""  # why the last attempt failed; empty if it did not
        self._held_until = -float("inf")
        self._logged_at = -float("inf")

    async def deliver_due(self) -> None:
        """Send what is due, oldest first, until the receiver is at fault."""
        if self._clock() < self._held_until:
            return
        for each in self.outbox.pending:
            if each.due <= self._clock() and not await self._attempt(each):
                return

    async def _attempt(self, each: Pending) -> bool:
        """Try one. Return False if the others have to wait."""
        try:
            await send(self.receiver, each.notification, self._now(), self._open)
        except NotTaken as error:
            await self._note_failure(each, error)
            return not error.waits
        if self.fault:
            logger.info("notifications are sent again to %s", self.receiver.host)
        self.sent, self.sent_at, self.fault = self.sent + 1, self._now(), ""
        self._logged_at = -float("inf")
        await asyncio.to_thread(self.outbox.done, each.notification.id)
        return True

    async def _note_failure(self, each: Pending, error: NotTaken) -> None:
        each.attempts += 1
        each.due = self._clock() + max(error.retry_after_s, pause_s(each.attempts, self._draw()))
        if error.waits:
            self._held_until = each.due
        self.failed, self.failed_at, self.fault = self.failed + 1, self._now(), str(error)
        if self._clock() - self._logged_at >= LOG_EVERY_S:
            self._logged_at = self._clock()
            logger.warning("a notification was not taken: %s; it is sent again", error)
        if self._clock() - each.since > GIVE_UP_S:
            await asyncio.to_thread(self.outbox.give_up, each.notification.id)


def pause_s(attempts: int, drawn: float) -> float:
    """Return the seconds to wait after so many failed attempts. `drawn`: a random number in [0, 1)."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(attempts - 1, 20)) * (0.5 + drawn / 2))
