"""The coordinator as one object: its runs, tokens and threads. The REST interface is a thin layer around it."""

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from anyio import CapacityLimiter
from sqlalchemy import URL, select
from sqlalchemy.exc import SQLAlchemyError

from coordinator.aggregation import queue
from coordinator.aggregation.delegation import Delegation
from coordinator.backup import directory
from coordinator.backup.bucket import BucketBackupMaker
from coordinator.backup.directory import BackupSource, DirectoryBackups
from coordinator.backup.scheduled import ScheduledBackups
from coordinator.notifications.sending import Notifier, receivers_of
from coordinator.process import RecentErrors
from coordinator.quotas import Quotas
from coordinator.reporting.alerts import Alerts
from coordinator.rounds import leases, membership
from coordinator.run.live_run import Change, LiveRun, RunContext
from coordinator.run.waiters import READS_AT_ONCE, Waiters
from coordinator.settings import Settings
from coordinator.store import postgresql
from coordinator.store.blobs import OWNER, Blobs, OpenStore, StoreProbe
from coordinator.store.data_directory import DataDirectory
from coordinator.store.database import Database, Fence, url_of
from coordinator.store.identity import Actor, Identity, audit_entries
from coordinator.store.lease import Peers
from coordinator.store.opening import store_at
from coordinator.store.partial_uploads import PartialUploads
from coordinator.store.payloads import MemoryBudget
from coordinator.store.tables import RunRow
from coordinator.store.tokens import Tokens, secret_hash
from coordinator.sync import direct_uploads, retention
from coordinator.sync.settling import settle
from coordinator.upkeep import redoing, removing, restoring, rolling_back, verifying
from coordinator.upkeep.storage import REMIND_S, Storage
from protocol.digest import digest
from protocol.errors import OuterstepError, Problem, SpecError
from protocol.messages import AuditEntry, Cause, NewToken, Page, RollBack, RunState, TokenInfo, TokenRequest
from protocol.spec.run import RunSpec, parse_spec
from protocol.text import existing_names

DELEGATED = 64  # threads that wait for aggregators; each waits for one task

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Term:
    """What a coordinator gets from its process for one term, if it shares its database with others.

    fence    keeps it from writing once another one leads
    data     the data directory, which the process keeps between terms
    peers    the coordinators that share the database
    probe    of the bucket
    errors   what the process has logged, in all of its terms
    """

    fence: Fence
    data: DataDirectory
    peers: Peers
    probe: StoreProbe | None = None
    errors: RecentErrors = field(default_factory=RecentErrors)


class Coordinator:
    """All runs of one database and its data directory. Methods may be called from any thread; each run has its own
    lock."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        store: OpenStore | None = None,
        secret: bytes | None = None,
        term: Term | None = None,
    ) -> None:
        """`store`: None for that in the settings. `secret`: None for that in the database. `term`: None if no other
        coordinator shares its database."""
        self.settings, self.clock, self.now, self.term = settings, clock, now, term
        self.errors = RecentErrors() if term is None else term.errors
        self._closing = threading.Event()
        with ExitStack() as opened:
            url, blobs, probe = self._open(opened, store)
            self._start(opened, url, blobs, probe, secret)
            self._opened = opened.pop_all()

    @property
    def peers(self) -> Peers | None:
        """The coordinators that share its database; None if there can be none."""
        return None if self.term is None else self.term.peers

    def _open(self, opened: ExitStack, store: OpenStore | None) -> tuple[URL, Blobs, StoreProbe | None]:
        """Open the data directory, the database and the blobs until `opened` is closed. Return the database's URL, the
        blobs, and the probe of their bucket."""
        settings, term = self.settings, self.term
        if settings.backup_dir is not None:
            directory.check_apart(settings.backup_dir, settings.data_dir)
            if settings.blobs is not None:
                raise OuterstepError(
                    "with --blobs backups are in that bucket, so leave --backup-dir out; for a copy elsewhere, run "
                    "`outerstep coordinator backup DIR` on a schedule of yours"
                )
        url = url_of(settings.database, settings.data_dir)
        if term is not None:
            url = postgresql.named(url, term.fence.holder)
            self.data = term.data
            self.database = opened.enter_context(closing(Database(url, term.fence)))
            store = store or store_at(
                settings.blobs, self.database, settings.blobs_public_url, self.now, term.fence.holds
            )
            return url, store(self.data), term.probe
        self.data = opened.enter_context(closing(DataDirectory(settings.data_dir)))
        self.database = opened.enter_context(closing(Database(url)))
        store = store or store_at(settings.blobs, self.database, settings.blobs_public_url, self.now)
        blobs = store(self.data)
        if blobs.bucket is None:
            return url, blobs, None
        probe = StoreProbe(partial(blobs.bucket.objects.get, OWNER), time.monotonic)
        probe.start(self._closing)
        return url, blobs, probe

    def _start(self, opened: ExitStack, url: URL, blobs: Blobs, probe: StoreProbe | None, secret: bytes | None) -> None:
        """Start the threads, and restore the runs."""
        settings, clock, now, shared = self.settings, self.clock, self.now, self.term is not None
        self.waiters = Waiters()
        self.memory = MemoryBudget()
        self.partial_uploads = PartialUploads(clock, settings.parts_bytes_per_member)
        opened.callback(self.partial_uploads.sweep, -math.inf)
        self.quotas = Quotas(settings, clock)
        self.read_threads, self.parse_thread = CapacityLimiter(READS_AT_ONCE), CapacityLimiter(1)
        self.tokens = Tokens(self.database, now)
        chosen = settings.admin_token.get_secret_value() if settings.admin_token else None
        if done := self.tokens.ensure_admin(settings.data_dir / "admin.token", chosen):
            logger.info("%s", done)
        cores = os.cpu_count() or 1
        self._jobs = self._threads(opened, "publish", max(cores, DELEGATED) if shared else cores)
        self._verifying = self._threads(opened, "verify", 1)
        self.verify_at: dict[int, float] = {}
        self._tick_faults: dict[str, tuple[str, float]] = {}  # by kind: the last fault, and when it was logged
        self.storage = Storage(self.data, blobs, self.database, self._jobs.submit, clock, probe)
        self.notifier = Notifier(receivers_of(settings), clock, now)
        opened.callback(self.notifier.close)
        self.alerts = Alerts(clock, self.notifier.note_alert)
        self.started_at = now()
        self._in_bucket: BucketBackupMaker | None = None
        self.backups = self._scheduled(url, blobs)
        if self.backups is not None:
            opened.callback(self.backups.close)
        self.delegation = self._delegating(opened, url) if shared else None
        self._context = RunContext(
            database=self.database,
            data=self.data,
            blobs=blobs,
            submit=self._jobs.submit,
            wake=self.waiters.wake,
            storage_failed=self.storage.note,
            storage_fault=lambda: self.storage.fault,
            memory=self.memory,
            closing=self._closing,
            notify=self.notifier.note_event,
            back_up=self._back_up,
            secret=secret or self.database.secret(),
            delegation=self.delegation,
            working=threading.BoundedSemaphore(cores) if shared else nullcontext(),
            clock=clock,
            now=now,
        )
        self._runs: dict[str, LiveRun] = {}
        self._creating = threading.Lock()
        self._restore()

    def _restore(self) -> None:
        """Restore the runs of the database."""
        with self.database.read() as session:
            rows = session.scalars(select(RunRow)).all()
        # SQLite would reuse the id of a removed run, but other objects may still refer to that id.
        self._ids = itertools.count(1 + max((row.id for row in rows), default=0))
        for row in rows:
            run = LiveRun(row, self._context, settle)
            self._runs[run.name] = run
            restoring.restore_owners(run)
            retention.forget(run)  # before the sweeps, so that no row names a blob that they delete
        needed = self._back_up()
        removing.finish(self._context, {row.name for row in rows})
        for run in self._runs.values():
            restoring.restore(run, needed)
        self.data.clear_restored()

    def _delegating(self, opened: ExitStack, url: URL) -> Delegation:
        """Return what leaves work to aggregators until `opened` is closed. Tasks of an earlier leader are removed."""
        delegation = Delegation(self.database)
        opened.callback(delegation.close)
        opened.enter_context(closing(postgresql.Bell(url, queue.RESULTS, delegation.wake)))
        delegation.start()
        return delegation

    def _threads(self, opened: ExitStack, name: str, count: int) -> ThreadPoolExecutor:
        """Return threads that are stopped when `opened` is closed."""
        threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        opened.callback(threads.shutdown, wait=True, cancel_futures=True)
        opened.callback(self._closing.set)
        return threads

    def _scheduled(self, url: URL, blobs: Blobs) -> ScheduledBackups | None:
        """Return the scheduled backups: in the bucket that has the blobs, or in the settings' `backup_dir`; None if
        there is neither."""
        settings = self.settings
        when = settings.backup_every_s, self._closing, self.clock, self.now
        if blobs.bucket is not None:
            maker = self._in_bucket = BucketBackupMaker(blobs.bucket, url, self.data.scratch, self.now)
            return ScheduledBackups(maker.backups, maker.make, *when)
        if settings.backup_dir is not None:
            backups, source = DirectoryBackups(settings.backup_dir), BackupSource(url, blobs.open)
            return ScheduledBackups(backups, partial(backups.make, source, settings.backup_keep, self.now), *when)
        return None

    def _back_up(self, *, alone: bool = False) -> frozenset[str]:
        if self._in_bucket is None or self.backups is None:
            return frozenset()
        self.backups.make_now(partial(self._in_bucket.make, alone=alone))
        return self._in_bucket.needed

    @property
    def last_backup_at(self) -> float | None:
        """The time of the last successful scheduled backup, in seconds since 1970."""
        return None if self.backups is None else self.backups.last_at

    def close(self) -> None:
        """Stop the threads, and close the database and the data directory. The next start resumes unfinished work."""
        self._closing.set()
        self._opened.close()

    def tick(self) -> None:
        """Do what depends on time alone, such as deadlines and leases. Called a few times a second."""
        self._guarded("storage", self.storage.check)
        self._guarded("uploads", self.partial_uploads.sweep)
        self._guarded("tokens", self._tick_tokens)
        self._guarded("alerts", self._tick_alerts)
        if self.backups is not None:
            self._guarded("backups", self.backups.tick)
        for run in list(self._runs.values()):
            self._guarded(run.name, partial(self._tick_run, run))

    def _tick_alerts(self) -> None:
        fault = self.storage.fault
        full = fault is not None and fault.cause is Cause.STORAGE_FULL
        backups_trouble = None if self.backups is None else self.backups.trouble
        self.alerts.check(self.runs(), self.places(), backups_trouble, disk_is_full=full)

    def _tick_tokens(self) -> None:
        if self.tokens.drop_expired():
            self._wake_all()
        self.tokens.write_last_uses()

    def _tick_run(self, run: LiveRun) -> None:
        leases.end_without_token(run, self.tokens.is_good)
        leases.expire(run)
        leases.note_stalled(run)
        leases.replace_silent_seeder(run)
        leases.end_lingering(run)
        run.settle()
        rolling_back.roll_back_if_due(run, verifying=partial(self._is_verifying, run))
        redoing.redo_if_due(run, verifying=partial(self._is_verifying, run))
        verifying.start_when_due(run, self.verify_at, self._verifying.submit)
        retention.trim_events(run)
        direct_uploads.discard_expired(run)
        self.storage.tick(run)
        if self.backups is not None:
            self.backups.record(run)

    def _guarded(self, what: str, act: Callable[[], object]) -> None:
        """Do a part of a tick. If it fails, the other parts still run, and the next tick tries again. A new failure is
        logged, and then every REMIND_S seconds; `Storage` logs faults of the disk and the database."""
        try:
            act()
        except Exception as error:
            if self.storage.note(error) is not None:
                return
            before, now = self._tick_faults.get(what), self._context.clock()
            if before is None or before[0] != str(error) or now - before[1] >= REMIND_S:
                self._tick_faults[what] = str(error), now
                logger.exception("%s: tick failed; retrying", what)

    def places(self) -> dict[str, Path]:
        """Return the local folders whose disks must not fill up, by name ("data", "database")."""
        folder = self.database.folder
        return {"data": self.data.root} | ({} if folder is None else {"database": folder})

    # --- tokens ---------------------------------------------------------------------------------------------------

    def new_token(self, request: TokenRequest, by: Actor) -> NewToken:
        """Create a token. Only this reply has its secret. Raises Problem `not-found` if its run does not exist."""
        if request.run is not None:
            self.run(request.run)
        return self.tokens.create(request, by)

    def rotate_token(self, token_id: str, by: Actor, of_run: str | None = None) -> NewToken:
        """Give a token a new secret, and end the streams and long polls that use the old one. Raises Problem like
        `Tokens.rotate`."""
        made = self.tokens.rotate(token_id, by, of_run)
        self._wake_all()
        return made

    def revoke_token(self, token_id: str, by: Actor, of_run: str | None = None) -> None:
        """Delete a token, and end its memberships, streams and long polls. Raises Problem like `Tokens.revoke`."""
        self.tokens.revoke(token_id, by, of_run)
        for run in self.runs():
            leases.end_without_token(run, self.tokens.is_good)
        self._wake_all()

    def exchange_token(
        self, run: LiveRun, worker: str, secret: str, by: Identity, actor: Actor
    ) -> tuple[TokenInfo, bool]:
        """Create the worker token `secret` for one use of the join token `by`. Return it, and True if it is new. Raises
        Problem like `Tokens.exchange`."""
        membership.check_joinable(run)
        check = partial(membership.check_name_free, run=run, worker=worker)
        return self.tokens.exchange(by, run.name, worker, secret, actor, check)

    def audit(self, run: str | None, limit: int, before: int | None) -> Page[AuditEntry]:
        """Return the audit log's entries with numbers below `before` (None: all), newest first. `run`: only entries of
        this run; None: all."""
        return audit_entries(self.database, run, limit, before)

    def _wake_all(self) -> None:
        """Wake all long polls and streams; each checks its token again."""
        for run in self.runs():
            self.waiters.wake(run.name, None)

    def check_ready(self) -> None:
        """Raise Problem `not-ready` unless the database answers and the data directory is writable."""
        try:
            with self.database.read() as session:
                session.execute(select(RunRow.id).limit(1))
        except (OSError, SQLAlchemyError) as error:
            raise Problem("not-ready", f"the database: {postgresql.first_line(error)}", retry_after_s=5) from error
        probe = self.data.scratch()
        try:
            try:
                probe.write_bytes(b"ready?")
            finally:
                probe.unlink(missing_ok=True)  # on a read-only file system this fails like the write
        except OSError as error:
            raise Problem("not-ready", f"{self.settings.data_dir}: {error}", retry_after_s=5) from error

    def identify(self, secret: str) -> Identity | None:
        """Return the holder of a bearer token; None if the token is unknown."""
        identity = self._find(secret_hash(secret))
        if identity is not None and identity.scope is not None:
            self.tokens.note_use(identity)
        return identity

    def check_still(self, identity: Identity) -> None:
        """Raise Problem `unauthorized` unless the request's token is still valid."""
        if self._find(identity.secret_hash) is None:
            raise Problem("unauthorized", "the token was revoked, or the lease that it belongs to has ended")

    def _find(self, hashed: bytes) -> Identity | None:
        identity = self.tokens.find(hashed)
        if identity is not None:
            return identity
        for run in list(self._runs.values()):
            worker = run.members.by_token_hash.get(hashed)
            if worker is not None:
                token = run.members.token(worker)
                lineage = None if token is None else self.tokens.lineage(token)
                return Identity(None, run.name, worker, token, secret_hash=hashed, lineage=lineage)
        return None

    def run(self, name: str) -> LiveRun:
        """Return the run of this name. Raises Problem `not-found`."""
        run = self._runs.get(name)
        if run is None:
            raise Problem("not-found", f"there is no run {name}; {existing_names(name, self._runs, 'runs')}")
        return run

    def runs(self) -> list[LiveRun]:
        """Return all runs, by name."""
        return sorted(self._runs.values(), key=lambda run: run.name)

    def create_run(self, spec_toml: str, by: Actor) -> tuple[LiveRun, bool]:
        """Create a run from its spec. Return it, and True if it is new. The same spec again returns the same run.

        Raises Problem: invalid-spec; run-exists, if the run has a different spec.
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
                raise Problem("run-exists", f"the run {spec.name} exists with another spec; choose another name")
            return existing, False
        if spec.model.run is not None and spec.model.run not in self._runs:
            raise Problem("invalid-spec", f"model.run = {spec.model.run!r}: there is no such run on this coordinator")
        now = self._context.now()
        spec = spec.dated(datetime.fromtimestamp(now, UTC).date())
        with self.database.write() as session:
            row = RunRow(
                id=next(self._ids),
                name=spec.name,
                spec_toml=spec_toml,
                spec_digest=digest(spec_toml.encode()),
                spec=spec.model_dump(mode="json"),
                state=RunState.RUNNING,
                created_at=now,
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
        """Roll the run back to a checkpoint for an operator. Raises Problem like `rolling_back.roll_back`."""
        rolling_back.roll_back(run, order, by, verifying=partial(self._is_verifying, run))

    def _is_verifying(self, run: LiveRun) -> bool:
        return self.verify_at.get(run.id) == math.inf

    def remove_run(self, name: str, by: Actor) -> None:
        """Remove a run that has ended, with its files and the tokens for it.

        Raises Problem: not-found, run-not-ended, not-ready (work on it is in progress).
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
                raise Problem("run-not-ended", f"the run {other.name} starts from {run.name} and has no state 0 yet")
