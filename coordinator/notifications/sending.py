"""The threads that send notifications, one for each URL, so that no round and no other receiver waits for them.

A notification is sent once: a failure is logged and counted, and a restart drops what is queued.
"""

import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from coordinator.notifications import services, webhook
from coordinator.notifications.notification import EVENT_KINDS, DeliveryError, Notification
from coordinator.settings import Settings

logger = logging.getLogger(__name__)

MAX_QUEUED = 100
CLOSE_S = 2.0  # to send what is queued when the coordinator stops
# A worker that flaps, or a thousand that disconnect at once, must not send a thousand messages.
WINDOW_S = 900.0
PER_WINDOW = 5  # per kind and run


@dataclass(frozen=True)
class Receiver:
    """A URL that gets notifications. `name`: the part of it that is not secret, which is the host of a webhook or the
    name of a service. `secret`: signs notifications to a webhook."""

    url: str = field(repr=False)
    name: str
    secret: str | None = field(repr=False)
    is_webhook: bool

    def send(self, each: Notification, now: float) -> None:
        """Send a notification. Raises DeliveryError."""
        if self.is_webhook:
            webhook.send(self.url, self.secret, each, now)
        else:
            services.send(self.url, each)


def receivers_of(settings: Settings) -> list[Receiver]:
    """Return the receivers in the settings. Raises OuterstepError if Apprise is needed and not installed."""
    secret = settings.notify_secret.get_secret_value() if settings.notify_secret else None
    receivers = []
    for url in settings.notify_url.get_secret_value().split() if settings.notify_url else ():
        parts = urlsplit(url)
        if parts.scheme in ("http", "https"):
            receivers.append(Receiver(url, parts.hostname or "", secret, is_webhook=True))
        else:
            services.check_installed()
            receivers.append(Receiver(url, parts.scheme, None, is_webhook=False))
    return receivers


class Sender:
    """Sends notifications to one receiver, in a thread. Methods may be called from any thread."""

    def __init__(self, receiver: Receiver, now: Callable[[], float]) -> None:
        self.receiver, self._now = receiver, now
        self.sent = self.failed = 0
        self.sent_at: float | None = None  # of the last one; this and `failed_at` in seconds since 1970
        self.failed_at: float | None = None
        self.fault = ""  # why the last one failed; empty if it was sent
        self._queue = SimpleQueue[Notification | None]()
        self._closed = False
        self._noting = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
        self._thread.start()

    def post(self, each: Notification) -> None:
        """Queue a notification. Returns at once."""
        if self._queue.qsize() < MAX_QUEUED:
            self._queue.put(each)
        else:
            self._note_failure(f"{self.receiver.name}: {MAX_QUEUED} notifications are waiting already")

    def close(self) -> None:
        """Stop the thread, once it has sent what is queued or after CLOSE_S."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)
        self._closed = True

    def _work(self) -> None:
        while (each := self._queue.get()) is not None and not self._closed:
            try:
                self.receiver.send(each, self._now())
            except DeliveryError as error:
                self._note_failure(str(error))
            except Exception as error:  # noqa: BLE001 - its text may contain the URL
                self._note_failure(f"{self.receiver.name}: {type(error).__name__}")
            else:
                with self._noting:
                    self.sent, self.sent_at, self.fault = self.sent + 1, self._now(), ""

    def _note_failure(self, fault: str) -> None:
        with self._noting:
            if fault != self.fault:
                logger.warning("a notification was not sent: %s", fault)
            self.failed, self.failed_at, self.fault = self.failed + 1, self._now(), fault


class Notifier:
    """Sends notifications to all receivers. Methods may be called from any thread, and return at once.

    `clock` is monotonic, `now` returns seconds since 1970.
    """

    def __init__(self, receivers: Sequence[Receiver], clock: Callable[[], float], now: Callable[[], float]) -> None:
        self._clock, self._now = clock, now
        self.senders = [Sender(each, now) for each in receivers]
        self._recent: defaultdict[tuple[str, str], deque[float]] = defaultdict(deque)  # by kind and run
        self._suppressed: Counter[tuple[str, str]] = Counter()

    def note_event(self, run: str, event: str, message: str, data: Mapping[str, Any]) -> None:
        """Notify of a run's event, if events of this kind are notified and there were not too many. Called with the
        run's lock."""
        if (kind := EVENT_KINDS.get(event)) is None:
            return
        key, recent = (kind, run), self._recent[kind, run]
        while recent and recent[0] <= self._clock() - WINDOW_S:
            recent.popleft()
        if len(recent) >= PER_WINDOW:
            self._suppressed[key] += 1
            return
        recent.append(self._clock())
        if suppressed := self._suppressed.pop(key, 0):
            message = f"{message} ({suppressed} similar ones were not sent; see the run's events)"
        self._post(Notification(kind, self._now(), message, None, run, data.get("worker"), data.get("round")))

    def note_alert(self, kind: str, message: str, state: str, run: str | None, round_: int | None) -> None:
        """Notify of an alert that begins ("firing") or ends ("resolved")."""
        self._post(Notification(kind, self._now(), message, state, run, None, round_))

    def _post(self, each: Notification) -> None:
        for sender in self.senders:
            sender.post(each)

    def close(self) -> None:
        """Stop the threads."""
        for sender in self.senders:
            sender.close()
