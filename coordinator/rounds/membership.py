"""Joining a run, and what an operator can do to a worker. `leases.py` covers how a membership continues and ends.

A name belongs to the token that first joined with it, even after the lease has ended, until an operator releases it.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.rounds import steering
from coordinator.rounds.leases import end_lease
from coordinator.run.live_run import Change, LiveRun, RunModel
from coordinator.store.identity import Actor, Identity
from coordinator.store.tables import WorkerRow
from coordinator.store.tokens import new_secret, secret_hash
from coordinator.trust.quarantine import inherit_score, readmit
from protocol.errors import LayoutError, Problem
from protocol.fragments import first_difference
from protocol.messages import (
    DataSummary,
    JoinReply,
    JoinRequest,
    WorkerChange,
    WorkerState,
    data_difference,
)
from protocol.spec.run import PRIVATE_WORKERS, RunSpec
from protocol.spec.sections import check_pin

_REFUSED = ("model-mismatch", "data-mismatch", "pin-mismatch")
DRAINING_S = 5.0  # a worker that cannot join a draining run retries after this time


def join(
    run: LiveRun,
    worker: str,
    request: JoinRequest,
    by: Identity,
    actor: Actor,
    is_good: Callable[[str], bool],
) -> JoinReply:
    """Let `worker` join with the token of `by`. The first worker fixes layout, frozen parameters and training set. A
    worker with different ones is rejected, except that the training set may differ with private data.

    `is_good` returns whether the token with that id is still good: it may have been revoked since authentication.
    Raises Problem: run-ended, run-draining, banned, worker-name-taken, worker-name-owned, forbidden, unauthorized,
    model-mismatch, data-mismatch, pin-mismatch. The last three are also reported as an event, because the run may wait
    for this worker.
    """
    with _reporting_refusal(run, worker), run.change() as change:
        if by.token is not None and not is_good(by.token):
            raise Problem("unauthorized", "the token was revoked, or has expired")
        check_joinable(run)
        session, members = change.session, run.members
        model = _model(change, request)
        row = session.scalars(
            select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name == worker)
        ).one_or_none()
        if row is not None and row.state == WorkerState.BANNED:
            raise Problem("banned", f"the operator has banned {worker} from the run {run.name}")
        if row is None:
            row = WorkerRow(run_id=run.id, name=worker, epoch=0, metrics={}, place=_next_place(change))
        _claim_name(change, row, by, actor)
        if not row.epoch:
            inherit_score(change, row)
        old_hash = row.token_hash
        repeated = _is_secret_of(request.member_token, old_hash)  # a retry: the answer was lost
        same_worker = repeated or _is_secret_of(request.previous, old_hash)
        remaining_s = members.remaining_s(worker, run.context.clock())
        if remaining_s is not None and not same_worker:
            raise Problem(
                "worker-name-taken",
                f"a live worker of the run {run.name} has the name {worker}; choose another name, or wait: "
                f"if that worker is dead, its lease ends in {remaining_s:.0f} s",
                retry_after_s=remaining_s,
            )
        if remaining_s is None and steering.refuses_join(run, worker):
            raise Problem(
                "run-draining",
                f"the run {run.name} is draining and takes no newcomers: its workers finish the open round and leave; "
                "retry until it is paused or resumed",
                retry_after_s=DRAINING_S,
            )
        secret = request.member_token or new_secret()[0]
        hashed = secret_hash(secret)  # the database rejects a secret that another worker has (`VIOLATIONS`)
        session.add(row)
        if run.spec.data.private:
            _bring_own_data(row, request.data)
        row.epoch += not repeated
        row.state, row.token_hash, row.joined_at = WorkerState.LIVE, hashed, run.context.now()
        row.host, row.state_round, row.state_digest = request.host, None, None
        if not repeated:
            message = f"{worker} joined ({row.epoch}.)" if row.epoch > 1 else f"{worker} joined"
            change.record("joined", message, worker=worker)
        proven = bool(row.contributions)
        change.after_commit(lambda: members.join(worker, hashed, run.context.clock(), token=by.token, proven=proven))
        if run.open is not None:  # it may carry units of earlier rounds now
            change.after_commit(partial(run.open.without_earlier_units.discard, worker))
        epoch, lease_s = row.epoch, members.lease_s
        return JoinReply(worker=worker, member_token=secret, epoch=epoch, lease_s=lease_s, layout=model.layout)


@contextmanager
def _reporting_refusal(run: LiveRun, worker: str) -> Iterator[None]:
    """Record an event if the worker is refused for its model or data, once for each reason. Not for the name of a live
    worker: that one has joined, and somebody else was refused."""
    try:
        yield
    except Problem as problem:
        if problem.slug in _REFUSED and worker not in run.members and run.members.refuse(worker, problem.detail):
            with run.change() as change:
                change.record("refused", f"{worker} cannot join: {problem.detail}", worker=worker)
        raise


def check_joinable(run: LiveRun) -> None:
    """Raise Problem `run-ended` if the run is over."""
    if run.ended:
        raise Problem("run-ended", f"the run {run.name} is {run.state}")


def _is_secret_of(secret: str | None, hashed: bytes | None) -> bool:
    return secret is not None and hashed is not None and secrets.compare_digest(secret_hash(secret), hashed)


def _next_place(change: Change) -> int:
    """Return how many workers have ever joined the run. Raises Problem if the unit numbers are used up, so that another
    worker's private data would have none."""
    place = change.session.scalars(select(func.count()).where(WorkerRow.run_id == change.run.id)).one()
    if change.run.spec.data.private and place >= PRIVATE_WORKERS:
        raise Problem(
            "run-full",
            f"{place} workers with private data have joined the run {change.run.name}, and no unit numbers are left "
            "for another one; join under the name of a worker that has left, with its data, or create a new run",
        )
    return place


def _bring_own_data(row: WorkerRow, data: DataSummary | None) -> None:
    """Record the length of the worker's own training set, and the weight of its units. Raises Problem if they were
    different before: the same units would then mean other rows."""
    units, unit_tokens = (None, None) if data is None else (data.units, data.unit_tokens)
    if row.epoch and (row.units, row.unit_tokens) != (units, unit_tokens):
        raise Problem(
            "data-mismatch",
            f"the training set of {row.name} has {_units(units, unit_tokens)} per epoch, but had "
            f"{_units(row.units, row.unit_tokens)} when it first joined; use that one, or join with the new one under "
            "another name",
        )
    row.units, row.unit_tokens = units, unit_tokens


def check_rows(run: LiveRun, worker: str, rows: int) -> None:
    """Raise Problem `data-mismatch` if another live worker draws the run's units from a data set of another length. A
    unit would then mean different rows, so some rows would be trained on twice and some never."""
    if run.spec.data.private:
        return
    if (other := run.members.agree_on_rows(worker, rows)) is not None:
        name, theirs = other
        raise Problem(
            "data-mismatch",
            f"the data set of {worker} has {rows} rows, that of {name} {theirs}: batches() and unit_sampler() need the "
            "same rows on all workers. Load the same data set everywhere, or draw different data on each worker with "
            "diloco.data_seed",
        )


def _units(count: int | None, tokens: int | None) -> str:
    known = "an unknown number of units" if count is None else f"{count} units"
    return known if tokens is None else f"{known} of {tokens} trained tokens"


def _model(change: Change, request: JoinRequest) -> RunModel:
    """Return the run's model; the first worker fixes it. Raises Problem if this worker's model or training set
    differs."""
    run, model, private = change.run, change.run.model, change.run.spec.data.private
    if request.data is not None and (request.data.digest is None) != private:
        raise Problem(
            "data-mismatch",
            f"data.digest is {request.data.digest}: with data.private = {str(private).lower()} a worker sends "
            f"{'no digest, only the length of its training set' if private else 'the digest of its training set'}",
        )
    _check_unit_tokens(run.spec, request.data)
    if model is None:
        try:
            layout = run.spec.sync.plan_layout(request.tensors)
        except LayoutError as error:
            raise Problem("model-mismatch", str(error)) from error
        pins = run.spec.pins
        check_pin("layout", pins.layout, layout.digest().hex())
        check_pin("frozen", pins.frozen, request.frozen.digest if request.frozen else None)
        check_pin("data", pins.data, request.data.digest if request.data else None)
        model = RunModel(layout=layout, data=request.data, frozen=request.frozen)
        change.set_model(model)
        return model
    if difference := first_difference(model.layout.tensors, request.tensors):
        raise Problem("model-mismatch", f"this worker's model is not the model of the run {run.name}: {difference}")
    if model.frozen is not None and request.frozen != model.frozen:
        raise Problem(
            "model-mismatch",
            f"this worker's frozen parameters ({request.frozen or 'none'}) are not those of the run {run.name} "
            f"({model.frozen}); load the same weights everywhere, from the same directory or revision, and without "
            "--param-dtype bf16 if they are fp32",
        )
    if difference := data_difference(request.data, model.data, run.spec.data):
        raise Problem("data-mismatch", difference)
    if private and model.data is None and request.data is not None:  # the first worker that reports its tokenizer
        model = model.model_copy(update={"data": request.data})
        change.set_model(model)
    return model


def _check_unit_tokens(spec: RunSpec, data: DataSummary | None) -> None:
    """Raise Problem unless the worker reports the weight of its units exactly if its data are conversations, and not
    more tokens than a unit has."""
    given = None if data is None else data.unit_tokens
    if spec.data.format == "text" and given is not None:
        raise Problem("data-mismatch", f'data.unit_tokens is {given}, but with data.format = "text" it must be null')
    if spec.data.format != "text" and data is not None and not 0 < (given or 0) <= spec.unit_tokens:
        raise Problem(
            "data-mismatch",
            f'data.unit_tokens is {given}: with data.format = "{spec.data.format}" it is the number of trained tokens '
            f"of a unit, 1 to {spec.unit_tokens}",
        )


def change_worker(run: LiveRun, worker: str, request: WorkerChange, by: Actor) -> None:
    """Evict, ban or readmit a worker, or release its name, as the operator asks."""
    with run.change() as change:
        row = change.session.scalars(
            select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name == worker)
        ).first()
        if row is None:
            raise Problem("not-found", f"the run {run.name} never had a worker {worker}")
        change.audit(by, f"worker-{request.state}", f"the worker {worker} was {request.state}")
        if request.state == "released":
            row.token = None
        elif request.state == "readmitted":
            if row.state == WorkerState.BANNED:
                row.state = WorkerState.EVICTED
                change.record("readmitted", f"{worker} may join again", worker=worker)
            if readmit(change, row):
                change.record("readmitted", f"{worker} takes part again", worker=worker)
                change.wake()
        elif worker in run.members:
            end_lease(change, worker, WorkerState(request.state), f"was {request.state} by the operator")
        elif request.state == "banned" and row.state != WorkerState.BANNED:
            row.state = WorkerState.BANNED
            change.record("banned", f"{worker} was banned by the operator", worker=worker)
        elif request.state == "evicted":
            raise Problem("not-found", f"the run {run.name} has no live worker {worker}")


# --- names ------------------------------------------------------------------------------------------------------------


def check_name_free(session: Session, run: LiveRun, worker: str) -> None:
    """Raise Problem `worker-name-owned` if any token owns the name."""
    row = session.scalars(select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name == worker)).one_or_none()
    if row is not None and row.token is not None:
        raise _owned(run, worker)


def _claim_name(change: Change, row: WorkerRow, by: Identity, actor: Actor) -> None:
    """Give the name to the token `by`. Raises Problem: worker-name-owned, if another token owns it; forbidden, if the
    token may not join under this name or has used up its number of names."""
    run = change.run
    if row.token is not None and row.token != by.token:
        raise _owned(run, row.name)
    if by.worker is not None and by.worker != row.name:
        raise Problem(
            "forbidden",
            f"this token is for the worker {by.worker} only; join under that name, or use a join token",
        )
    if by.token is None or row.token == by.token:
        return
    if by.names is not None:
        query = select(func.count(func.distinct(WorkerRow.name)))
        others = change.session.scalars(query.where(WorkerRow.token == by.token, WorkerRow.name != row.name)).one()
        if others >= by.names:
            raise Problem(
                "forbidden",
                f"the token {by.token} is for {by.names} worker {'name' if by.names == 1 else 'names'}, and all "
                "of them are used; join under one of those, or have an admin create a separate token for this machine: "
                "`outerstep token create --scope join` for many boxes, `--scope worker --names N` for several workers",
            )
    row.token = by.token
    change.audit(actor, "name-claimed", f"the name {row.name} now belongs to the token {by.token}")


def _owned(run: LiveRun, worker: str) -> Problem:
    return Problem(
        "worker-name-owned",
        f"the name {worker} belongs to another token in the run {run.name}; join with that token, or under another "
        f"name (--name), or have an operator release it: outerstep run member {run.name} {worker} release",
    )
