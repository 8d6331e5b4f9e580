"""The coordinator as one object: its runs, its tokens, its threads. The REST interface is a thin layer around it."""

import itertools
import logging
import math
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from anyio import CapacityLimiter
from sqlalchemy import URL, select
from sqlalchemy.exc import SQLAlchemyError

from coordinator.backup import places
from coordinator.backup.making import Source
from coordinator.backup.scheduled import Schedule, Scheduled
from coordinator.callers import Callers
from coordinator.logs import RecentErrors
from coordinator.notifications.formats import new_id
from coordinator.notifications.outbox import Outbox
from coordinator.notifications.sending import Sender, receiver_of
from coordinator.notifications.watching import Watch
from coordinator.run.live_run import Change, LiveRun, RunContext
from coordinator.run.waiters import READS_AT_ONCE, Waiters
from coordinator.settings import Settings
from coordinator.settling import settle
from coordinator.sharing import Shared
from coordinator.store import audit
from coordinator.store.assembling import Wholes
from coordinator.store.blobs import Store
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import Database, url_of
from coordinator.store.directory_blobs import DirectoryBlobs
from coordinator.store.identity import Actor, Identity
from coordinator.store.tables import RunRow
from coordinator.store.tokens import Tokens, secret_hash
from coordinator.sync import retention
from coordinator.tuning.room import Room
from coordinator.upkeep import removing, restoring, rolling_back, verifying
from coordinator.upkeep.storage import REMIND_S, Storage
from coordinator.workers import leases, membership
from protocol.digest import digest
from protocol.errors import Problem, SpecError
from protocol.messages import AuditEntry, Cause, Event, NewToken, Page, RollBack, RunState, TokenInfo, TokenRequest
from protocol.spec.run import RunSpec, parse_spec
from protocol.text import existing_names

logger = logging.getLogger(__name__)

ANSWERS_BYTES = 8 << 20  # of answers that are told again
EVENT_BYTES = 1024  # that an event is taken for


class Coordinator:
    """All runs of one database and its data directory. Methods are called from many threads; each run has a lock."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        store: Store = DirectoryBlobs,
        secret: bytes | None = None,
    ) -> None:
        self.settings, self.clock, self.now = settings, clock, now
        self.waiters = Waiters()
        self.room = Room()
        self.wholes = Wholes(clock, settings.parts_bytes_per_member)
        self.callers = Callers(settings, clock)
        self.answers = Shared[bytes](len, ANSWERS_BYTES, clock)
        self.metrics = Shared[bytes](len, ANSWERS_BYTES, clock)
        self.event_pages = Shared[Page[Event]](lambda page: EVENT_BYTES * len(page.items), ANSWERS_BYTES, clock)
        if settings.backup_dir is not None:
            places.check(settings.backup_dir, settings.data_dir)
        self.reading, self.parsing = CapacityLimiter(READS_AT_ONCE), CapacityLimiter(1)  # threads
        url = url_of(settings.database_url, settings.data_dir)
        self.data = DataDirectory(settings.data_dir)
        self.database = Database(url)
        self.tokens = Tokens(self.database, now)
        chosen = settings.admin_token.get_secret_value() if settings.admin_token else None
        if done := self.tokens.ensure_admin(settings.data_dir / "admin.token", chosen):
            logger.info("%s", done)
        self._jobs = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="publish")
        self._verifying = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self.verify_at: dict[int, float] = {}
        self._tick_faults: dict[str, tuple[str, float]] = {}  # the last of each kind, and when it was logged
        self._closing = threading.Event()
        self.storage = Storage(self.data, self.database, clock)
        receiver = receiver_of(settings.notify_url, settings.notify_format, settings.notify_secret)
        self.outbox = None if receiver is None else Outbox(self.database, new_id, clock, now)
        self.sender = None
        if receiver is not None and self.outbox is not None:
            self.sender = Sender(receiver, self.outbox, clock, now, random.random)
        self.watch = Watch(clock, self.outbox)
        self.errors = RecentErrors()
        self.started_at = now()
        self._context = RunContext(
            database=self.database,
            data=self.data,
            blobs=store(self.data),
            submit=self._jobs.submit,
            wake=self.waiters.wake,
            storage_failed=self.storage.note,
            storage_fault=lambda: self.storage.fault,
            room=self.room,
            closing=self._closing,
            notify=self.outbox.note_event if self.outbox else lambda *_: None,
            secret=secret or os.urandom(32),
            clock=clock,
            now=now,
        )
        self._runs: dict[str, LiveRun] = {}
        self._creating = threading.Lock()
        with self.database.read() as session:
            rows = session.scalars(select(RunRow)).all()
        # SQLite gives the number of a removed run to the next one, and somebody may still have the former.
        self._ids = itertools.count(1 + max((row.id for row in rows), default=0))
        removing.finish(self._context, {row.name for row in rows})
        for row in rows:
            run = LiveRun(row, self._context, settle)
            self._runs[run.name] = run
            restoring.restore(run)
        self.data.gone_on()
        self.backups = self._scheduled(url)

    def _scheduled(self, url: URL) -> Scheduled | None:
        """Return the backups that the settings ask for."""
        if (address := self.settings.backup_dir) is None:
            return None
        schedule = Schedule(address, self.settings.backup_every_s, self.settings.backup_keep)
        context = self._context
        return Scheduled(schedule, Source(url, context.blobs.open), self._closing, context.clock, context.now)

    @property
    def last_backup_at(self) -> float | None:
        """When the last good backup of the schedule was made, in seconds since 1970."""
        return None if self.backups is None else self.backups.last_at

    def close(self) -> None:
        """End the work on other threads and close database and directory. The next start resumes the work."""
        self._closing.set()
        for threads in (self._jobs, self._verifying):
            threads.shutdown(wait=True, cancel_futures=True)
        if self.backups is not None:
            self.backups.close()
        self.database.close()
        self.data.close()

    def tick(self) -> None:
        """Do what only the passing of time brings about. Called a few times a second."""
        self._guarded("storage", self.storage.check)
        self._guarded("uploads", self.wholes.sweep)
        self._guarded("tokens", self._tick_tokens)
        self._guarded("watch", self._tick_watch)
        if self.backups is not None:
            self._guarded("backups", self.backups.tick)
        for run in list(self._runs.values()):
            self._guarded(run.name, partial(self._tick_run, run))

    def _tick_watch(self) -> None:
        fault = self.storage.fault
        full = fault is not None and fault.cause is Cause.STORAGE_FULL
        self.watch.look(self.runs(), self.places(), self.backups, disk_is_full=full)

    def _tick_tokens(self) -> None:
        if self.tokens.drop_expired():
            self._ring_all()
        self.tokens.write_last_uses()

    def _tick_run(self, run: LiveRun) -> None:
        leases.end_without_token(run, self.tokens.is_good)
        leases.expire(run)
        leases.replace_silent_seeder(run)
        leases.end_lingering(run)
        run.settle()
        rolling_back.roll_back_if_due(run, verifying=partial(self._is_verifying, run))
        verifying.start_when_due(run, self.verify_at, self._verifying.submit)
        retention.trim_events(run)
        self.storage.tick(run)
        if self.backups is not None:
            self.backups.tell(run)

    def _guarded(self, what: str, act: Callable[[], object]) -> None:
        """Do a part of a tick. A fault of it must not stop the others; the next tick tries again. It is logged when it
        is new, and then every REMIND_S; one of disk or database as `Storage` does it."""
        try:
            act()
        except Exception as error:
            if self.storage.note(error) is not None:
                return
            before, now = self._tick_faults.get(what), self._context.clock()
            if before is None or before[0] != str(error) or now - before[1] >= REMIND_S:
                self._tick_faults[what] = str(error), now
                logger.exception("%s: tick failed; trying again", what)

    def places(self) -> dict[str, Path]:
        """Return where on this machine it keeps what it keeps: folders whose disks must not fill up, by name."""
        folder = self.database.folder
        return {"data": self.data.root} | ({} if folder is None else {"database": folder})

    # --- tokens ---------------------------------------------------------------------------------------------------

    def new_token(self, request: TokenRequest, by: Actor) -> NewToken:
        """Make a token; its secret is in the answer alone. Raises Problem `not-found` for a run that there is not."""
        if request.run is not None:
            self.run(request.run)
        return self.tokens.create(request, by)

    def rotate_token(self, token_id: str, by: Actor, of_run: str | None = None) -> NewToken:
        """Give a token another secret, and end the streams and long polls with the one before. Raises Problem."""
        made = self.tokens.rotate(token_id, by, of_run)
        self._ring_all()
        return made

    def revoke_token(self, token_id: str, by: Actor, of_run: str | None = None) -> None:
        """Delete a token, and end all that there is by it: memberships, streams, long polls. Raises Problem."""
        self.tokens.revoke(token_id, by, of_run)
        for run in self.runs():
            leases.end_without_token(run, self.tokens.is_good)
        self._ring_all()

    def exchange_token(
        self, run: LiveRun, worker: str, secret: str, by: Identity, actor: Actor
    ) -> tuple[TokenInfo, bool]:
        """Make the worker token `secret` in exchange for a use of the join token `by`; return it, and True if it is
        new. Raises Problem."""
        membership.check_joinable(run)
        check = partial(membership.check_name_free, run=run, worker=worker)
        return self.tokens.exchange(by, run.name, worker, secret, actor, check)

    def audit(self, run: str | None, limit: int, before: int | None) -> Page[AuditEntry]:
        """Return the entries of the audit below number `before` (None: all), newest first; of `run` alone unless it is
        None."""
        return audit.entries(self.database, run, limit, before)

    def _ring_all(self) -> None:
        """Wake whoever waits: who may not wait any more is told so."""
        for run in self.runs():
            self.waiters.wake(run.name, None)

    def check_ready(self) -> None:
        """Raise Problem `not-ready` unless the database answers and the data directory takes writes."""
        try:
            with self.database.read() as session:
                session.execute(select(RunRow.id).limit(1))
        except (OSError, SQLAlchemyError) as error:
            raise Problem("not-ready", f"the database: {error}", retry_after_s=5) from error
        probe = self.data.scratch()
        try:
            try:
                probe.write_bytes(b"ready?")
            finally:
                probe.unlink(missing_ok=True)  # fails like the write where the file system is read-only
        except OSError as error:
            raise Problem("not-ready", f"{self.settings.data_dir}: {error}", retry_after_s=5) from error

    def identify(self, secret: str) -> Identity | None:
        """Return the holder of a bearer token; None if there is no such token."""
        identity = self._find(secret_hash(secret))
        if identity is not None and identity.scope is not None:
            self.tokens.note_use(identity)
        return identity

    def check_still(self, identity: Identity) -> None:
        """Raise Problem `unauthorized` unless the token, by which a request was let in, is still good."""
        if self._find(identity.secret_hash) is None:
            raise Problem("unauthorized", "the token was revoked, or the lease that it belongs to has ended")

    def _find(self, hashed: bytes) -> Identity | None:
        identity = self.tokens.find(hashed)
        if identity is not None:
            return identity
        for run in list(self._runs.values()):
            worker = run.members.by_token.get(hashed)
            if worker is not None:
                token = run.members.token(worker)
                lineage = None if token is None else self.tokens.lineage(token)
                return Identity(None, run.name, worker, token, secret_hash=hashed, lineage=lineage)
        return None

    def run(self, name: str) -> LiveRun:
        """Return the run of this name. Problem `not-found` if there is none."""
        run = self._runs.get(name)
        if run is None:
            raise Problem("not-found", f"there is no run {name}; {existing_names(name, self._runs, 'runs')}")
        return run

    def runs(self) -> list[LiveRun]:
        """Return all runs, by name."""
        return sorted(self._runs.values(), key=lambda run: run.name)

    def create_run(self, spec_toml: str, by: Actor) -> tuple[LiveRun, bool]:
        """Create a run from its spec; return it, and True if it is new. The same spec again is the same run.

        Raises Problem: invalid-spec, run-exists (with another spec).
        """
        try:
            spec = parse_spec(spec_toml)
        except SpecError as error:
            raise Problem("invalid-spec", str(error)) from error
        with self._creating:
            return self._create_run(spec, spec_toml, by)

    def _create_run(self, spec: RunSpec, spec_toml: str, by: Actor) -> tuple[LiveRun, bool]:
        existing = self._runs.get(spec.name)
        if existing is not None:
            with self.database.read() as session:
                same = session.get_one(RunRow, existing.id).spec_toml == spec_toml
            if not same:
                raise Problem("run-exists", f"the run {spec.name} exists with another spec; choose a new name")
            return existing, False
        if spec.model.run is not None and spec.model.run not in self._runs:
            raise Problem("invalid-spec", f"model.run = {spec.model.run!r}: there is no such run on this coordinator")
        with self.database.write() as session:
            row = RunRow(
                id=next(self._ids),
                name=spec.name,
                spec_toml=spec_toml,
                spec_digest=digest(spec_toml.encode()),
                spec=spec.model_dump(mode="json"),
                state=RunState.RUNNING,
                created_at=self._context.now(),
                round=0,
                next_unit=0,
            )
            session.add(row)
            session.flush()
            run = LiveRun(row, self._context, settle)
            change = Change(run, session)
            change.record("created", f"the run {spec.name} was created")
            change.audit(by, "run-created", f"created the run {spec.name}")
        for apply in change.applied_later:
            apply()
        run.restored()
        self._runs[spec.name] = run
        return run, True

    def roll_back(self, run: LiveRun, order: RollBack, by: Actor) -> None:
        """Take the run back to a checkpoint, as the operator asks. Raises Problem as `rolling_back.roll_back` does."""
        rolling_back.roll_back(run, order, by, verifying=partial(self._is_verifying, run))

    def _is_verifying(self, run: LiveRun) -> bool:
        return self.verify_at.get(run.id) == math.inf

    def remove_run(self, name: str, by: Actor) -> None:
        """Remove a run that has ended, with its files and the tokens that are for it alone.

        Raises Problem: not-found, run-not-ended, not-ready (work on it is under way).
        """
        with self._creating:
            run = self.run(name)
            self._check_not_needed(run)
            with run.lock:
                removing.remove_rows(run, by, verifying=self._is_verifying(run))
                del self._runs[name]
            self.tokens.forget_of(name)
            removing.remove_blobs(self._context, name)
        logger.info("the run %s was removed", name)

    def _check_not_needed(self, run: LiveRun) -> None:
        for other in self.runs():
            if other.spec.model.run == run.name and not other.seeded and not other.ended:
                raise Problem("run-not-ended", f"the run {other.name} is to start from {run.name}, and has not begun")
