"""Joining, heartbeats, leaving, and being lost. A worker is live exactly while it holds a lease."""

import hashlib
import secrets

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator import accounting, assigning, publishing, steering
from coordinator.live_run import LiveRun, worker_row
from coordinator.tables import WorkerRow
from coordinator.units import return_units
from protocol.errors import LayoutError, Problem
from protocol.fragments import Layout, first_difference, plan_fragments
from protocol.messages import (
    Directive,
    JoinReply,
    JoinRequest,
    LeaseReply,
    LeaveRequest,
    Metrics,
    RunState,
    WorkerChange,
    WorkerState,
)

TOKEN_PREFIX = "ost_"
DIRECTIVES = {RunState.STOPPED: Directive.STOP, RunState.DRAINING: Directive.DRAIN}


def new_secret() -> tuple[str, bytes]:
    """A bearer token and the hash under which it is stored."""
    secret = TOKEN_PREFIX + secrets.token_urlsafe(32)
    return secret, secret_hash(secret)


def secret_hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def join(run: LiveRun, worker: str, request: JoinRequest) -> JoinReply:
    """Let `worker` in. The first one fixes layout and training set; who differs from them is refused."""
    with run.lock:
        if run.ended:
            raise Problem("run-ended", f"the run {run.name} is {run.state}")
        with run.world.database.write() as session:
            layout = _model(run, session, request)
            row = session.scalars(
                select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name == worker)
            ).one_or_none()
            if row is not None and row.state == WorkerState.BANNED:
                raise Problem("banned", f"the operator has banned {worker} from the run {run.name}")
            old_hash = None if row is None else row.token_hash
            repeated = _is_secret_of(request.member_token, old_hash)  # the answer was lost, so it asks again
            same_worker = repeated or _is_secret_of(request.previous, old_hash)
            remaining_s = run.leases.remaining_s(worker, run.world.clock())
            if remaining_s is not None and not same_worker:
                raise Problem(
                    "worker-name-taken",
                    f"a live worker of the run {run.name} has the name {worker}; choose another name, or wait: "
                    f"if that worker is dead, its lease ends in {remaining_s:.0f} s",
                    retry_after_s=remaining_s,
                )
            if row is None:
                row = WorkerRow(run_id=run.id, name=worker, epoch=0, metrics={})
                session.add(row)
            secret = request.member_token or new_secret()[0]
            hashed = secret_hash(secret)
            row.epoch += not repeated
            row.state, row.token_hash, row.joined_at = WorkerState.LIVE, hashed, run.world.now()
            row.host, row.state_round, row.state_digest = request.host, None, None
            epoch = row.epoch
            if not repeated:
                message = f"{worker} joined ({epoch}.)" if epoch > 1 else f"{worker} joined"
                run.record(session, "joined", message, worker=worker)
        if run.layout is None:
            run.layout, run.data = layout, request.data
        if old_hash is not None:
            run.member_tokens.pop(old_hash, None)
        run.member_tokens[hashed] = worker
        run.metrics[worker] = Metrics()
        run.leases.renew(worker, run.world.clock())
        run.ring()
        return JoinReply(worker=worker, member_token=secret, epoch=epoch, lease_s=run.leases.term_s, layout=layout)


def _is_secret_of(secret: str | None, hashed: bytes | None) -> bool:
    return secret is not None and hashed is not None and secrets.compare_digest(secret_hash(secret), hashed)


def _model(run: LiveRun, session: Session, request: JoinRequest) -> Layout:
    """The run's layout: fixed by the first worker; Problem where this worker's model or training set is another."""
    if run.layout is None:
        try:
            sync = run.spec.sync
            layout = plan_fragments(
                request.tensors,
                sync.fragment_elements,
                strided=sync.fragment_layers == "strided",
                taper=sync.offsets == "together",
            )
        except LayoutError as error:
            raise Problem("model-mismatch", str(error)) from error
        row = run.row(session)
        row.layout = layout.model_dump()
        row.data = None if request.data is None else request.data.model_dump()
        return layout
    if difference := first_difference(run.layout.tensors, request.tensors):
        raise Problem("model-mismatch", f"this worker's model is not the model of the run {run.name}: {difference}")
    if request.data != run.data:
        raise Problem(
            "data-mismatch",
            f"this worker's training set ({_data(request.data)}) is not the run's ({_data(run.data)}); "
            f"make data.source = {run.spec.data.source!r} hold the same files everywhere",
        )
    return run.layout


def _data(data: object) -> str:
    return "none" if data is None else str(data)


def renew(run: LiveRun, worker: str, metrics: Metrics) -> LeaseReply:
    """A heartbeat. It renews a lease that lives; it does not revive one that ended while the request was on its way.

    It neither takes the run's lock nor touches the database.
    """
    if not run.leases.renew_live(worker, run.world.clock()):
        raise _ended(worker)
    run.metrics[worker] = metrics
    directive = DIRECTIVES.get(run.state, Directive.CONTINUE)
    return LeaseReply(directive=directive, reason=assigning.standing(run), lease_s=run.leases.term_s)


def check_lease(run: LiveRun, worker: str) -> None:
    """Problem `unauthorized` unless `worker` is live. Holds the lock."""
    if worker not in run.leases:
        raise _ended(worker)


def _ended(worker: str) -> Problem:
    return Problem("unauthorized", f"the lease of {worker} has ended; join again")


def leave(run: LiveRun, worker: str, request: LeaveRequest, *, by_operator: bool) -> None:
    """The worker goes in peace: its unused units return to the pool."""
    with run.lock:
        if by_operator and worker not in run.leases:
            raise Problem("not-found", f"the run {run.name} has no live worker {worker}")
        check_lease(run, worker)  # it may have ended while the request was on its way
        if "metrics" in request.model_fields_set:
            run.metrics[worker] = request.metrics
        if request.report is not None:
            accounting.keep(run, worker, request.report)
        _end_lease(run, worker, WorkerState.LEFT, "left", request)


def expire(run: LiveRun) -> None:
    """End the leases that ran out."""
    with run.lock:
        for worker in run.leases.expired(run.world.clock()):
            silent_s = run.leases.last_seen_s(worker, run.world.clock())
            if silent_s is not None and silent_s > run.leases.term_s:  # nor was it heard of while others were ended
                message = f"was silent for {run.leases.term_s:.0f} s and is taken for dead"
                _end_lease(run, worker, WorkerState.LOST, message)


def change(run: LiveRun, worker: str, request: WorkerChange) -> None:
    """What the operator does to a worker: evict it, ban it, or let a banned one join again."""
    with run.lock:
        with run.world.database.read() as session:
            row = session.scalars(select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name == worker)).first()
        if row is None:
            raise Problem("not-found", f"the run {run.name} never had a worker {worker}")
        if request.state == "readmitted":
            if row.state == WorkerState.BANNED:
                _set_state(run, worker, WorkerState.EVICTED, "readmitted", f"{worker} may join again")
        elif worker in run.leases:
            _end_lease(run, worker, WorkerState(request.state), f"was {request.state} by the operator")
        elif request.state == "banned" and row.state != WorkerState.BANNED:
            _set_state(run, worker, WorkerState.BANNED, "banned", f"{worker} was banned by the operator")
        elif request.state == "evicted":
            raise Problem("not-found", f"the run {run.name} has no live worker {worker}")


def _set_state(run: LiveRun, worker: str, state: WorkerState, kind: str, message: str) -> None:
    with run.world.database.write() as session:
        worker_row(run, session, worker).state = state
        run.record(session, kind, message, worker=worker)
    run.ring()


def _end_lease(run: LiveRun, worker: str, state: WorkerState, what: str, told: LeaveRequest | None = None) -> None:
    with run.world.database.write() as session:
        row = session.scalars(select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name == worker)).one()
        old_hash, row.token_hash, row.state = row.token_hash, None, state
        row.metrics = run.metrics.get(worker, Metrics()).model_dump(mode="json")
        if told is not None and told.state_digest is not None:
            row.state_round, row.state_digest = told.state_round, bytes.fromhex(told.state_digest)
        return_units(session, run.id, worker)
        run.record(session, str(state), f"{worker} {what}", worker=worker)
        finished = run.final_digest is not None and told is not None and told.state_round == run.round
        if finished and row.state_digest != run.final_digest:
            row.divergences += 1
            run.row(session).divergences += 1
            run.record(session, "diverged", f"{worker} left with another state than the run's", worker=worker)
    if old_hash is not None:
        run.member_tokens.pop(old_hash, None)
    run.leases.end(worker)
    run.ready.discard(worker)
    run.previous.discard(worker)
    if run.seeder == worker:
        run.seeder = None
    if run.evaluator == worker:
        run.evaluator = None
    run.diverged.pop(worker, None)
    if run.open is not None:
        run.open.given.pop(worker, None)
    publishing.close_due(run)
    assigning.try_open(run)
    steering.note_drained(run)
    run.wake()
