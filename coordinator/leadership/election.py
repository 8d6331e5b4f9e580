"""The election: a thread that renews this coordinator's lease, or takes the lease when nobody holds it.

A leader that cannot reach the store gives up its lease if another coordinator can. A second thread watches how long
the database has not answered, because one that hangs raises no error.
"""

import logging
import math
import secrets
import threading
from collections.abc import Callable

from sqlalchemy import URL, Connection
from sqlalchemy.exc import SQLAlchemyError

from coordinator.process import RecentErrors
from coordinator.store import lease, postgresql
from coordinator.store.blobs import PROBE_S, STORE_S, StoreProbe
from coordinator.store.database import Fence
from coordinator.store.lease import FRESH_S, LEASE_S, Leader, Peer, Peers
from protocol import __version__

RENEW_S = 1.0
POLL_S = 0.5  # between looks at the lease of another coordinator
MARGIN_S = 1.0  # a leader stops leading this long before its lease expires
# Without an answer of the store, until a leader gives way to a coordinator that can reach it. By then every
# coordinator has noticed and reported an outage that all of them have.
GIVE_WAY_S = STORE_S + PROBE_S + 1.0
DATABASE_S = 3.0  # without an answer of the database, until that is reported
WATCH_S = 1.0
REST_S = 3.0  # after a failed attempt to lead
CLOCK_S = 0.1  # smaller differences from the database's clock are the time of the query
ROUNDING_S = 0.001  # of a time that the database has computed

logger = logging.getLogger(__name__)


class Election:
    """Decides whether this coordinator leads. Its attributes may be read from any thread.

    id        of this process, drawn at its start
    address   where other coordinators reach it
    fence     the fencing token while it leads, and until `finish` is called
    leader    the lease as it was last read; None if it never was
    renewed   the token of the last lease whose holder was seen to renew it, so it is a process that runs
    peers     the coordinators that share the database, as they were last read
    engine    a connection to the database, in which every statement commits by itself
    probe     of the store
    errors    what this process has logged, in all of its terms and between them
    """

    def __init__(self, url: URL, address: str, probe: StoreProbe, clock: Callable[[], float]) -> None:
        """`url`: of the database."""
        self.id = secrets.token_hex(8)
        self.fence: Fence | None = None
        self.leader: Leader | None = None
        self.peers, self.errors = Peers(self.id), RecentErrors()
        self.renewed: int | None = None
        self._error = ""  # of the last question to the database
        self.asked_at: float | None = None  # when the question was asked that has no answer yet
        self._logged = {"database": False, "store": False}  # whether the outage was logged that lasts
        self.engine = postgresql.engine_of(postgresql.named(url, self.id))
        self.address, self.probe, self._clock = address, probe, clock
        self._valid_until = self._rest_until = -math.inf
        self._offset: float | None = None  # the database's clock minus the monotonic one
        self._changed: Callable[[], object] = lambda: None
        self._replaced: Callable[[], object] = lambda: None
        self._stopping, self._wake = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._elect, name="election"),
            threading.Thread(target=self._watch, name="watch", daemon=True),
        ]

    def start(self, changed: Callable[[], object], replaced: Callable[[], object]) -> None:
        """Start to take part. Both functions are called on any thread: `changed` when `fence` has changed or is lost,
        `replaced` when another lease than before was read."""
        self._changed, self._replaced = changed, replaced
        for thread in self._threads:
            thread.start()
        self.probe.start(self._stopping)

    def withdraw(self) -> None:
        """Never take the lease again, because the process is about to stop."""
        self._rest_until = math.inf

    def stop(self) -> None:
        """Stop. Call it when the last term has finished."""
        self._stopping.set()
        self._wake.set()
        self._threads[0].join()
        self.engine.dispose()

    @property
    def fault(self) -> str:
        """Why the database cannot be asked; empty if it can."""
        asked_at = self.asked_at
        if asked_at is not None and (silent_s := self._clock() - asked_at) > DATABASE_S:
            return f"no answer for {silent_s:.0f} s"
        return self._error

    @property
    def store_fault(self) -> str:
        """Why this coordinator cannot use the store; empty if it can."""
        return self.probe.fault

    def leads(self) -> bool:
        """Return True while this coordinator leads for sure."""
        return self.fence is not None and self.fence.holds()

    def now(self) -> float:
        """Return the time of day, in seconds since 1970, by the database's clock."""
        assert self._offset is not None, "no term begins before the lease was read"
        return self._clock() + self._offset

    def finish(self, fence: Fence, *, rest: bool = False) -> None:
        """End the term, after everything that belongs to it has stopped. `rest`: let others try first."""
        fence.end()
        if rest:
            self._rest_until = self._clock() + REST_S
        try:
            with self.engine.connect() as connection:
                lease.release(connection, fence.token)
        except SQLAlchemyError as error:  # then it expires, unless this coordinator takes it again before
            logger.info("the lease could not be given up: %s", postgresql.first_line(error))
        self.fence = None
        self._wake.set()

    # --- the threads ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping.wait(WATCH_S):
            self.watch()

    def watch(self) -> None:
        """Log the beginning and the end of an outage of the database or the store."""
        for name, fault in (("database", self.fault), ("store", self.store_fault)):
            if fault and not self._logged[name]:
                logger.warning("the %s cannot be used: %s", name, fault)
            elif self._logged[name] and not fault:
                logger.info("the %s answers again", name)
            self._logged[name] = bool(fault)

    def _elect(self) -> None:
        while not self._stopping.is_set():
            self.step()
            self._wake.wait(POLL_S if self.fence is None else RENEW_S)
            self._wake.clear()
        try:
            with self.engine.connect() as connection:
                lease.retire(connection, self.id)
        except SQLAlchemyError as error:
            logger.info("the database does not know that this coordinator stops: %s", postgresql.first_line(error))

    def step(self) -> None:
        """Renew the lease, or look whether it can be taken."""
        fence = self.fence
        if fence is not None and not fence.lost.is_set() and self._clock() >= self._valid_until:
            logger.warning("the lease has expired and could not be renewed: %s", self.fault or "the process was paused")
            fence.end()
        self.asked_at = self._clock()
        try:
            with self.engine.connect() as connection:
                lease.report(connection, self.id, self.address, __version__, self.probe.fault)
                self._read(connection)
                if fence is None:
                    self._take(connection)
                elif fence.lost.is_set():
                    lease.release(connection, fence.token)
                else:
                    self._renew(connection, fence)
            self._error = ""
        except SQLAlchemyError as error:
            self._error = postgresql.first_line(error)
        self.asked_at = None

    def _read(self, connection: Connection) -> None:
        before, known = self._clock(), self.leader
        self.leader = lease.read(connection)
        self.peers.all = lease.peers(connection)
        self.peers.term, self.peers.leader = self.leader.token, None if self.leader.is_vacant else self.leader.holder
        self.peers.store_answer_s = self.probe.answer_s
        new = known is None or known.token != self.leader.token
        if new and not self.leader.is_vacant and self.leader.holder != self.id:
            logger.info("the coordinator at %s leads, and this one is a standby", self.leader.address)
        if known is not None and known.token != self.leader.token:
            self._replaced()
        elif known is not None and self.leader.expires_at - known.expires_at > ROUNDING_S:
            self.renewed = self.leader.token
        offset = self.leader.now - before
        if self._offset is None or abs(offset - self._offset) > CLOCK_S:
            self._offset = offset

    def _renew(self, connection: Connection, fence: Fence) -> None:
        if self.probe.silent_s > GIVE_WAY_S and any(self._is_better(peer) for peer in self.peers.all):
            logger.warning("this coordinator gives up the lease to one that can reach the store: %s", self.probe.why)
            fence.end()
            lease.release(connection, fence.token)
            return
        began = self._clock()
        if lease.renew(connection, fence.token):
            self._valid_until = began + LEASE_S - MARGIN_S
        else:
            ended = self.leader is not None and self.leader.holder == self.id
            logger.warning("the secret was rotated" if ended else "another coordinator has taken over")
            fence.end()

    def _is_better(self, peer: Peer) -> bool:
        return peer.id != self.id and peer.silent_s < FRESH_S and not peer.store_fault

    def _take(self, connection: Connection) -> None:
        assert self.leader is not None
        # Its own lease is left from a term that has ended while the database could not be reached.
        is_free = self.leader.is_vacant or self.leader.holder == self.id
        if not is_free or self._clock() < self._rest_until:
            return
        if self.probe.fault and any(self._is_better(peer) for peer in self.peers.all):
            return
        began = self._clock()
        token = lease.take(connection, self.id, self.address)
        if token is not None:
            self._valid_until = began + LEASE_S - MARGIN_S
            logger.info("this coordinator leads, with the fencing token %d", token)
            self.fence = Fence(
                token, self.id, lambda: self._clock() < self._valid_until, self._lost, self._count_rejected
            )
            self._changed()

    def _count_rejected(self) -> None:
        self.peers.superseded += 1

    def _lost(self) -> None:
        self._wake.set()
        self._changed()
