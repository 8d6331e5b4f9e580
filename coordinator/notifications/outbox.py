"""The outbox: notifications to send, in the database and in memory.

A notification of a run's event is committed together with the event (transactional outbox). It is retried until the
webhook accepts it, and then marked as done. After a crash in between it is sent once more, with the same id.

An alert, such as a stalled run, is a row that stays open until the alert ends, so a restart does not repeat it. When
the disk is full, no row can be written, but the notification is still needed: such notifications are sent from memory,
and written when there is free space.
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from coordinator.notifications.formats import EVENT_KINDS, Notification
from coordinator.store.database import Database, fault_of
from coordinator.store.tables import NotificationRow

logger = logging.getLogger(__name__)

MAX_PENDING = 1000
KEPT = 200  # rows of sent notifications
# A worker that flaps, or a thousand that disconnect at once, must not send a thousand messages.
WINDOW_S = 900.0
PER_WINDOW = 5  # per kind and run

Key = tuple[str, str | None]  # kind, run


@dataclass
class Pending:
    """A notification that is not sent yet. `since` and `due`: seconds of the monotonic clock."""

    notification: Notification
    since: float
    due: float = -math.inf
    attempts: int = 0


class Outbox:
    """Notifications to send, and alerts that have begun but not ended. Methods may be called from any thread.

    `draw_id` returns a new id; `clock` is monotonic, `now` returns seconds since 1970.
    """

    def __init__(
        self, database: Database, draw_id: Callable[[], str], clock: Callable[[], float], now: Callable[[], float]
    ) -> None:
        self._database, self._draw_id, self._clock, self._now = database, draw_id, clock, now
        self.dropped = 0  # number never sent, because too many were pending or the webhook failed for too long
        self._lock = threading.Lock()  # for the state in memory; never held during a database write
        self._flushing = threading.Lock()
        self._pending: dict[str, Pending] = {}
        self._open: dict[Key, Notification] = {}
        self._recent: dict[Key, deque[tuple[float, str | None]]] = {}
        self._suppressed: dict[Key, int] = {}
        self._unsaved: dict[str, Notification] = {}
        self._ended: set[str] = set()  # ids of rows that are still open in the database
        self._done: dict[str, float] = {}  # ids not yet marked in the database, and when they were done
        with database.read() as session:
            for row in session.scalars(select(NotificationRow).order_by(NotificationRow.number)):
                each = _notification(row)
                if row.done_at is None:
                    self._pending[each.id] = Pending(each, clock())
                if row.open:
                    self._open[each.kind, each.run] = each

    # --- adding ---------------------------------------------------------------------------------------------------

    def note_event(
        self, session: Session, run: str, kind: str, message: str, data: Mapping[str, Any]
    ) -> Callable[[], None] | None:
        """Add the notification of a run's event to the event's transaction. Return a function to call after the commit;
        None if this kind of event is not notified."""
        kind_ = EVENT_KINDS.get(kind)
        if kind_ is None:
            return None
        key, worker = (kind_, run), data.get("worker")
        with self._lock:
            if not self._may_send(key, worker):
                return lambda: self._suppress(key)
            if suppressed := self._suppressed.get(key, 0):
                message = f"{message} ({suppressed} similar ones were not sent; see the run's events)"
        each = Notification(self._draw_id(), self._now(), kind_, message, None, run, worker, data.get("round"))
        session.add(_row(each))
        return lambda: self._admit(key, each)

    def _may_send(self, key: Key, worker: str | None) -> bool:
        since = self._clock() - WINDOW_S
        recent = [worker for at, worker in self._recent.get(key, ()) if at > since]
        return len(recent) < PER_WINDOW and (worker is None or worker not in recent)

    def _suppress(self, key: Key) -> None:
        with self._lock:
            self._suppressed[key] = self._suppressed.get(key, 0) + 1

    def _admit(self, key: Key, each: Notification) -> None:
        with self._lock:
            self._suppressed.pop(key, None)
            self._recent.setdefault(key, deque(maxlen=PER_WINDOW)).append((self._clock(), each.worker))
            self._queue(each)

    def is_open(self, kind: str, run: str | None = None) -> Notification | None:
        """Return the notification that began this alert, if the alert is open; otherwise None."""
        with self._lock:
            return self._open.get((kind, run))

    def open_alerts(self, kind: str) -> list[Notification]:
        """Return the open alerts of this kind."""
        with self._lock:
            return [each for each in self._open.values() if each.kind == kind]

    def begin(self, kind: str, message: str, run: str | None = None, round_: int | None = None) -> None:
        """Notify that an alert has begun, unless it is open already."""
        with self._lock:
            if (kind, run) in self._open:
                return
            each = Notification(self._draw_id(), self._now(), kind, message, "firing", run, None, round_)
            self._open[kind, run] = self._unsaved[each.id] = each
            self._queue(each)
        self.flush()

    def end(self, kind: str, message: str, run: str | None = None, round_: int | None = None) -> None:
        """Notify that an alert has ended, if it is open."""
        with self._lock:
            begun = self._open.pop((kind, run), None)
            if begun is None:
                return
            self._ended.add(begun.id)
            each = Notification(self._draw_id(), self._now(), kind, message, "resolved", run, None, round_)
            self._unsaved[each.id] = each
            self._queue(each)
        self.flush()

    def forget_run(self, run: str) -> None:
        """Close the alerts of a removed run without a notification."""
        with self._lock:
            for key in [key for key in self._open if key[1] == run]:
                self._ended.add(self._open.pop(key).id)
            self._recent = {key: when for key, when in self._recent.items() if key[1] != run}
            self._suppressed = {key: count for key, count in self._suppressed.items() if key[1] != run}
        self.flush()

    def _queue(self, each: Notification) -> None:
        if len(self._pending) >= MAX_PENDING:
            self._drop(next(iter(self._pending)))
        self._pending[each.id] = Pending(each, self._clock())

    # --- sending --------------------------------------------------------------------------------------------------

    @property
    def pending(self) -> list[Pending]:
        """The notifications that are not sent yet, oldest first."""
        with self._lock:
            return list(self._pending.values())

    def done(self, id_: str) -> None:
        """Record that a notification was sent."""
        with self._lock:
            self._pending.pop(id_, None)
            self._done[id_] = self._now()
        self.flush()

    def give_up(self, id_: str) -> None:
        """Drop a notification without sending it."""
        with self._lock:
            if id_ in self._pending:
                self._drop(id_)
        self.flush()

    def _drop(self, id_: str) -> None:
        each = self._pending.pop(id_).notification
        self._done[id_] = self._now()
        self.dropped += 1
        logger.warning("notification dropped: %s: %s", each.title, each.message)

    # --- the database ---------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write to the database what is only in memory. If disk or database fail, the next call tries again."""
        with self._flushing:
            with self._lock:
                unsaved, ended, done = dict(self._unsaved), set(self._ended), dict(self._done)
            if not (unsaved or ended or done):
                return
            try:
                with self._database.write() as session:
                    session.add_all(_row(each, open_=each.state == "firing") for each in unsaved.values())
                    session.flush()
                    rows = update(NotificationRow)
                    for id_ in ended:
                        session.execute(rows.where(NotificationRow.id == id_).values(open=False))
                    for id_, at in done.items():
                        session.execute(rows.where(NotificationRow.id == id_).values(done_at=at))
                    _trim(session)
            except Exception as error:
                if fault_of(error) is None:
                    raise
                return
            with self._lock:
                for id_ in unsaved:
                    del self._unsaved[id_]
                self._ended -= ended
                for id_ in done:
                    del self._done[id_]


def _trim(session: Session) -> None:
    """Delete the oldest rows of notifications that are sent. Those of open alerts are kept."""
    sent = NotificationRow.done_at.is_not(None), NotificationRow.open.is_(False)
    kept = select(NotificationRow.number).where(*sent).order_by(NotificationRow.number.desc()).offset(KEPT).limit(1)
    if (last := session.scalar(kept)) is not None:
        session.execute(delete(NotificationRow).where(*sent, NotificationRow.number <= last))


def _row(each: Notification, *, open_: bool = False) -> NotificationRow:
    return NotificationRow(**vars(each), open=open_)


def _notification(row: NotificationRow) -> Notification:
    return Notification(row.id, row.at, row.kind, row.message, row.state, row.run, row.worker, row.round)
