"""Joining, heartbeats, leaving, and being lost. A worker is live exactly while it holds a lease."""

import secrets
from functools import partial

from sqlalchemy import func, select

from coordinator.runs.live_run import Change, LiveRun, Model
from coordinator.runs.opening import status
from coordinator.runs.units import return_units
from coordinator.store.tables import WorkerRow
from coordinator.store.tokens import new_secret, secret_hash
from coordinator.workers import accounting
from protocol.data_difference import data_difference
from protocol.errors import LayoutError, Problem
from protocol.fragments import first_difference, plan_fragments
from protocol.messages import (
    DataSummary,
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
from protocol.spec.run import PRIVATE_WORKERS

DIRECTIVES = {
    RunState.STOPPED: Directive.STOP,
    RunState.FINISHED: Directive.STOP,
    RunState.DRAINING: Directive.DRAIN,
}


def join(run: LiveRun, worker: str, request: JoinRequest) -> JoinReply:
    """Let `worker` join. The first one fixes layout, frozen parameters and training set; whoever has others is refused,
    but for training sets where each brings its own.

    Raises Problem: run-ended, banned, worker-name-taken, model-mismatch, data-mismatch.
    """
    with run.change() as change:
        if run.ended:
            raise Problem("run-ended", f"the run {run.name} is {run.state}")
        session, members = change.session, run.members
        model = _model(change, request)
        row = session.scalars(
            select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name == worker)
        ).one_or_none()
        if row is not None and row.state == WorkerState.BANNED:
            raise Problem("banned", f"the operator has banned {worker} from the run {run.name}")
        old_hash = None if row is None else row.token_hash
        repeated = _is_secret_of(request.member_token, old_hash)  # the answer was lost, so it asks again
        same_worker = repeated or _is_secret_of(request.previous, old_hash)
        remaining_s = members.remaining_s(worker, run.world.clock())
        if remaining_s is not None and not same_worker:
            raise Problem(
                "worker-name-taken",
                f"a live worker of the run {run.name} has the name {worker}; choose another name, or wait: "
                f"if that worker is dead, its lease ends in {remaining_s:.0f} s",
                retry_after_s=remaining_s,
            )
        if row is None:
            row = WorkerRow(run_id=run.id, name=worker, epoch=0, metrics={}, place=_next_place(change))
            session.add(row)
        if run.spec.data.private:
            _bring_own_data(row, request.data)
        secret = request.member_token or new_secret()[0]
        hashed = secret_hash(secret)
        row.epoch += not repeated
        row.state, row.token_hash, row.joined_at = WorkerState.LIVE, hashed, run.world.now()
        row.host, row.state_round, row.state_digest = request.host, None, None
        if not repeated:
            message = f"{worker} joined ({row.epoch}.)" if row.epoch > 1 else f"{worker} joined"
            change.record("joined", message, worker=worker)
        change.then(lambda: members.join(worker, hashed, run.world.clock()))
        epoch, lease_s = row.epoch, members.lease_s
        return JoinReply(worker=worker, member_token=secret, epoch=epoch, lease_s=lease_s, layout=model.layout)


def _is_secret_of(secret: str | None, hashed: bytes | None) -> bool:
    return secret is not None and hashed is not None and secrets.compare_digest(secret_hash(secret), hashed)


def _next_place(change: Change) -> int:
    """Return how many workers have ever joined the run. Raises Problem where private units' numbers are at an end."""
    place = change.session.scalars(select(func.count()).where(WorkerRow.run_id == change.run.id)).one()
    if change.run.spec.data.private and place >= PRIVATE_WORKERS:
        raise Problem(
            "run-full",
            f"{place} workers with private data have joined the run {change.run.name}: there are no numbers for the "
            "units of another one; join under the name of one that has left, with its data, or in a new run",
        )
    return place


def _bring_own_data(row: WorkerRow, data: DataSummary | None) -> None:
    """Note the length of the worker's own training set. Raises Problem if it had another one: its units would stand
    for other rows."""
    units = None if data is None else data.units
    if row.epoch and row.units != units:
        raise Problem(
            "data-mismatch",
            f"the training set of {row.name} has {_units(units)} per epoch, and had {_units(row.units)} when it joined "
            "first; bring that one, or join with the new one under another name",
        )
    row.units = units


def _units(count: int | None) -> str:
    return "an unknown number of units" if count is None else f"{count} units"


def _model(change: Change, request: JoinRequest) -> Model:
    """Return the run's model, which the first worker fixes. Raises Problem if this worker's model or training set is
    another."""
    run, model, private = change.run, change.run.model, change.run.spec.data.private
    if request.data is not None and (request.data.digest is None) != private:
        raise Problem(
            "data-mismatch",
            f"data.digest is {request.data.digest}: with data.private = {str(private).lower()} a worker tells "
            f"{'the length of its training set alone' if private else 'the digest of its training set'}",
        )
    if model is None:
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
        model = Model(layout=layout, data=request.data, frozen=request.frozen)
        change.set_model(model)
        return model
    if difference := first_difference(model.layout.tensors, request.tensors):
        raise Problem("model-mismatch", f"this worker's model is not the model of the run {run.name}: {difference}")
    if model.frozen is not None and request.frozen != model.frozen:
        raise Problem(
            "model-mismatch",
            f"this worker's frozen parameters ({request.frozen or 'none'}) are not those of the run {run.name} "
            f"({model.frozen}); load the same weights everywhere, of the same directory or revision, and without "
            "--parameters bf16 where they are fp32",
        )
    if difference := data_difference(request.data, model.data, run.spec.data):
        raise Problem("data-mismatch", difference)
    if private and model.data is None and request.data is not None:  # the first that tells of its tokenizer
        model = model.model_copy(update={"data": request.data})
        change.set_model(model)
    return model


def renew(run: LiveRun, worker: str, metrics: Metrics) -> LeaseReply:
    """Renew the lease of a live worker: a heartbeat. Problem `unauthorized` if the lease has ended meanwhile.

    Neither takes the run's lock nor touches the database.
    """
    if not run.members.renew(worker, run.world.clock(), metrics):
        raise _ended(worker)
    directive = DIRECTIVES.get(run.state, Directive.CONTINUE)
    return LeaseReply(directive=directive, reason=status(run), lease_s=run.members.lease_s)


def check_lease(run: LiveRun, worker: str) -> None:
    """Raise Problem `unauthorized` unless `worker` is live."""
    if worker not in run.members:
        raise _ended(worker)


def _ended(worker: str) -> Problem:
    return Problem("unauthorized", f"the lease of {worker} has ended; join again")


def leave(run: LiveRun, worker: str, request: LeaveRequest, *, by_operator: bool) -> None:
    """End the worker's lease because it leaves, or the operator makes it; its unused units return to the pool."""
    with run.lock:
        if by_operator and worker not in run.members:
            raise Problem("not-found", f"the run {run.name} has no live worker {worker}")
        check_lease(run, worker)  # it may have ended while the request was on its way
        if request.report is not None:
            accounting.book_report(run, worker, request.report)
        with run.change() as change:
            _end_lease(change, worker, WorkerState.LEFT, "left", request)


def expire(run: LiveRun) -> None:
    """End the leases that ran out."""
    members, clock = run.members, run.world.clock
    with run.lock:
        for worker in members.expired(clock()):
            silent_s = members.last_seen_s(worker, clock())
            if silent_s is not None and silent_s > members.lease_s:  # it may have been heard of since the list was made
                message = f"was silent for {members.lease_s:.0f} s and is taken for dead"
                with run.change() as change:
                    _end_lease(change, worker, WorkerState.LOST, message)


def change_worker(run: LiveRun, worker: str, request: WorkerChange) -> None:
    """Evict a worker, ban it, or let a banned one join again, as the operator asks."""
    with run.change() as change:
        row = change.session.scalars(
            select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name == worker)
        ).first()
        if row is None:
            raise Problem("not-found", f"the run {run.name} never had a worker {worker}")
        if request.state == "readmitted":
            if row.state == WorkerState.BANNED:
                row.state = WorkerState.EVICTED
                change.record("readmitted", f"{worker} may join again", worker=worker)
        elif worker in run.members:
            _end_lease(change, worker, WorkerState(request.state), f"was {request.state} by the operator")
        elif request.state == "banned" and row.state != WorkerState.BANNED:
            row.state = WorkerState.BANNED
            change.record("banned", f"{worker} was banned by the operator", worker=worker)
        elif request.state == "evicted":
            raise Problem("not-found", f"the run {run.name} has no live worker {worker}")


def _end_lease(change: Change, worker: str, state: WorkerState, what: str, request: LeaveRequest | None = None) -> None:
    """End the worker's lease and return its unused units. `request`: what it said as it left, if it did."""
    run, row = change.run, change.worker_row(worker)
    row.token_hash, row.state = None, state
    metrics = run.members.metrics(worker)
    if request is not None and "metrics" in request.model_fields_set:
        metrics = request.metrics
    row.metrics = metrics.model_dump(mode="json")
    if request is not None and request.state_digest is not None:
        row.state_round, row.state_digest = request.state_round, bytes.fromhex(request.state_digest)
    return_units(change.session, run.id, worker)
    change.record(str(state), f"{worker} {what}", worker=worker)
    finished = run.final_digest is not None and request is not None and request.state_round == run.round
    if finished and row.state_digest != run.final_digest:
        row.divergences += 1
        change.row.divergences += 1
        change.record("diverged", f"{worker} left with another state than the run's", worker=worker)

    change.then(partial(run.members.leave, worker))
    if run.open is not None:
        change.then(partial(run.open.leave, worker))
    change.wake()
