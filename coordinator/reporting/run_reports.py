"""What the REST interface shows of runs, workers, checkpoints and events. It comes from the database and the run in
memory."""

from itertools import pairwise
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.reporting.round_reports import held_out_fields, held_up_by, reason_of
from coordinator.run.live_run import LiveRun
from coordinator.run.schedule import expected_rounds
from coordinator.store.blobs import StoredBlob
from coordinator.store.tables import (
    CheckpointFragmentRow,
    CheckpointRow,
    EvaluationRow,
    EventRow,
    FragmentRow,
    RoundRow,
    RunRow,
    WorkerRow,
)
from coordinator.sync import checkpointing, retention
from coordinator.trust import held_out
from coordinator.trust.quarantine import reputation_of
from outerstep.common.quantities import PACE_ROUNDS, remaining_s
from protocol.errors import Problem
from protocol.messages import (
    Account,
    Cause,
    CheckpointDetail,
    CheckpointInfo,
    DiskBytes,
    Event,
    Metrics,
    Page,
    RunDetail,
    RunInfo,
    RunState,
    WorkerInfo,
    WorkerState,
)

CHECKPOINTS_NAMED = 5
VERIFIED_S = 5.0  # until a client retries to read a missing file, which is verified meanwhile


def state_of(run: LiveRun) -> RunState:
    """Return the state to show. A running run is shown as seeding until state 0 is complete."""
    return RunState.SEEDING if run.state is RunState.RUNNING and not run.seeded else run.state


def run_info(run: LiveRun) -> RunInfo:
    """Return the run as it is shown in a list of runs."""
    return RunInfo(**_run_fields(run))


def run_detail(run: LiveRun) -> RunDetail:
    """Return the run with its parsed spec and the bytes of its files."""
    direct = run.blobs.direct is not None
    return RunDetail(**_run_fields(run), spec=run.spec, disk_bytes=disk_bytes(run), direct=direct)


def spec_toml(run: LiveRun) -> str:
    """Return the run's spec as it was uploaded."""
    with run.context.database.read() as session:
        return session.get_one(RunRow, run.id).spec_toml


def disk_bytes(run: LiveRun) -> DiskBytes:
    """Return the bytes of the run's files, as the database has them: a bucket lists thousands of files slowly, or
    cannot be reached, and a report must not wait for it."""
    recorded = retention.recorded_bytes(run)
    return DiskBytes(**recorded, state=run.outer.files.bytes(), set_aside=run.set_aside_bytes)


def _run_fields(run: LiveRun) -> dict[str, Any]:
    with run.briefly_locked():
        state, final = run.state, run.final_digest
        remembered: dict[str, Any] = {
            "name": run.name,
            "state": state_of(run),
            "reason": reason_of(run),
            "held_up_by": held_up_by(run),
            "round": run.round,
            "rounds": expected_rounds(run),
            "step": run.step,
            "live_workers": len(run.members),
            "fragments": None if run.model is None else len(run.model.layout.fragments),
            "elements": None if run.model is None else run.model.layout.total_elements,
            "data": None if run.model is None else run.model.data,
            "frozen": None if run.model is None else run.model.frozen,
            "state_digest": None if final is None else final.hex(),
        }
    with run.context.database.read() as session:
        row = session.get_one(RunRow, run.id)
        evaluated = session.scalar(select(func.max(EvaluationRow.round)).where(EvaluationRow.run_id == run.id))
        measured = {} if evaluated is None else held_out.evaluations(session, run.id, evaluated)
        return {
            **remembered,
            "spec_digest": row.spec_digest.hex(),
            "created_at": row.created_at,
            "eta_s": _eta_s(session, run.id, state, remembered["rounds"] - remembered["round"], run.context.now())
            if remembered["held_up_by"] in (None, Cause.WORKER_SILENT)
            else None,
            "tokens": row.tokens,
            "upload_bytes": row.upload_bytes,
            "divergences": row.divergences,
            "account": Account.model_validate(row.account),
            **held_out_fields(measured),
        }


def _eta_s(session: Session, run_id: int, state: RunState, left: int, now: float) -> float | None:
    """Return how many seconds, from `now`, the run's `left` rounds will take, estimated from its last rounds. 0 once
    the run is over. None if unknown: no round was published yet, or no more rounds open."""
    if state in (RunState.FINISHED, RunState.STOPPED):
        return 0.0
    if state is not RunState.RUNNING:
        return None
    closed = select(RoundRow.opened_at, RoundRow.closed_at).where(
        RoundRow.run_id == run_id, RoundRow.closed_at.is_not(None)
    )
    rows = session.execute(closed.order_by(RoundRow.round.desc()).limit(PACE_ROUNDS)).all()
    if not rows:
        return None
    # From the end of one round to the end of the next, which includes the time between them.
    ends = [rows[-1].opened_at, *(row.closed_at for row in reversed(rows))]
    return remaining_s([max(end - start, 0.0) for start, end in pairwise(ends)], left, max(now - ends[-1], 0.0))


def workers(run: LiveRun, limit: int, after: str | None) -> Page[WorkerInfo]:
    """Return the workers with a name after `after` (None: all), by name."""
    with run.briefly_locked():
        pass  # wait until a change in progress is in the database
    with run.context.database.read() as session:
        query = select(WorkerRow).where(WorkerRow.run_id == run.id).order_by(WorkerRow.name).limit(limit + 1)
        if after is not None:
            query = query.where(WorkerRow.name > after)
        rows = session.scalars(query).all()
        items = [_worker(run, row) for row in rows[:limit]]
    return Page(items=items, next=items[-1].name if len(rows) > limit else None)


def worker(run: LiveRun, name: str) -> WorkerInfo:
    """Return a worker of the run, live or not. Raises Problem `not-found` if it never joined."""
    with run.briefly_locked():
        pass
    with run.context.database.read() as session:
        row = session.scalars(select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name == name)).one_or_none()
        if row is None:
            raise Problem("not-found", f"the run {run.name} never had a worker {name}")
        return _worker(run, row)


def _worker(run: LiveRun, row: WorkerRow) -> WorkerInfo:
    live = row.name in run.members
    reputation = reputation_of(row)
    return WorkerInfo(
        name=row.name,
        state=WorkerState(row.state),
        epoch=row.epoch,
        joined_at=row.joined_at,
        last_seen_s=run.members.last_seen_s(row.name, run.context.clock()),
        host=row.host,
        metrics=run.members.metrics(row.name) if live else Metrics.model_validate(row.metrics),
        contributions=row.contributions,
        tokens=row.tokens,
        upload_bytes=row.upload_bytes,
        direct=row.direct,
        account=Account.model_validate(row.account),
        divergences=row.divergences,
        state_round=row.state_round,
        state_digest=None if row.state_digest is None else row.state_digest.hex(),
        token=row.token,
        score=reputation.score,
        quarantined_until=reputation.until if reputation.until > run.round else None,
    )


def checkpoints(run: LiveRun, limit: int, before: int | None) -> Page[CheckpointInfo]:
    """Return the checkpoints before `before` (None: all), newest first."""
    with run.context.database.read() as session:
        query = select(CheckpointRow).where(CheckpointRow.run_id == run.id).order_by(CheckpointRow.round.desc())
        if before is not None:
            query = query.where(CheckpointRow.round < before)
        rows = session.scalars(query.limit(limit + 1)).all()
        items = [CheckpointInfo(**_checkpoint_fields(run, session, row)) for row in rows[:limit]]
    return Page(items=items, next=str(items[-1].round) if len(rows) > limit else None)


def checkpoint_detail(run: LiveRun, round_: int | None) -> CheckpointDetail:
    """Return the checkpoint of `round_` (None: the latest that is not damaged). Raises Problem: not-found, gone,
    file-lost."""
    with run.context.database.read() as session:
        query = select(CheckpointRow).where(CheckpointRow.run_id == run.id).order_by(CheckpointRow.round.desc())
        if round_ is not None:
            query = query.where(CheckpointRow.round == round_)
        rows = session.scalars(query).all()
        row = next((each for each in rows if each.round not in run.outer.damaged_checkpoints), None)
        if row is None or run.model is None:
            raise _no_checkpoint(run, session, round_)
        fragments = session.scalars(
            select(CheckpointFragmentRow)
            .where(CheckpointFragmentRow.run_id == run.id, CheckpointFragmentRow.round == row.round)
            .order_by(CheckpointFragmentRow.fragment)
        )
        return CheckpointDetail(
            **_checkpoint_fields(run, session, row),
            layout=run.model.layout,
            fragments=[checkpointing.describe(each, run.model.layout) for each in fragments],
        )


def stored_checkpoint(run: LiveRun, round_: int, fragment: int) -> StoredBlob:
    """Return the blob of a fragment of the checkpoint of `round_`. Raises Problem: not-found, gone, file-lost."""
    with run.context.database.read() as session:
        row = session.get(CheckpointFragmentRow, (run.id, round_, fragment))
        if row is None or round_ in run.outer.damaged_checkpoints:
            raise _no_checkpoint(run, session, round_)
        return StoredBlob(run.names.checkpoint(round_, fragment, row.digest), row.digest, row.size)


def lost_files(run: LiveRun) -> str | None:
    """Return why the run can neither continue nor be exported from its files; None if it can."""
    if run.outer.damage is not None:
        return run.outer.damage
    damaged = run.outer.damaged_checkpoints
    if not damaged or retention.complete_checkpoints(run):
        return None
    return f"no intact checkpoint is left, so nobody can join, resume or export the run: {damaged[max(damaged)]}"


def stored_delta(run: LiveRun, round_: int, fragment: int, digest: bytes) -> StoredBlob:
    """Return the blob of a published delta."""
    with run.context.database.read() as session:
        size = session.scalar(
            select(FragmentRow.delta_bytes).where(
                FragmentRow.run_id == run.id, FragmentRow.round == round_, FragmentRow.fragment == fragment
            )
        )
    return StoredBlob(run.names.delta(round_, fragment, digest), digest, size)


def missing_checkpoint(run: LiveRun, round_: int, fragment: int) -> Problem:
    """Return the Problem for a checkpoint fragment whose blob is missing or damaged. It requests a verification, which
    rebuilds the blob if possible. Raises Problem if the retention rule has just deleted the checkpoint."""
    stored_checkpoint(run, round_, fragment)
    run.outer.request_verification()
    return _being_verified(f"fragment {fragment} of checkpoint {round_}")


def missing_delta(run: LiveRun, round_: int, fragment: int) -> Problem:
    """Return the Problem for a delta whose blob is missing or damaged."""
    where = f"the delta of round {round_}, fragment {fragment},"
    if not retention.keeps_delta(run, round_):
        return Problem("gone", f"{where} was deleted by the retention rule; recover from the latest checkpoint")
    if (round_, fragment) in run.outer.lost_deltas:
        return Problem("gone", f"{where} was lost by the coordinator's disk; recover from the latest checkpoint")
    run.outer.request_verification()
    return _being_verified(where.removesuffix(","))


def _being_verified(what: str) -> Problem:
    detail = f"{what} is missing or damaged on the coordinator's disk; the coordinator is trying to rebuild it"
    return Problem("not-ready", detail, retry_after_s=VERIFIED_S)


def _no_checkpoint(run: LiveRun, session: Session, round_: int | None) -> Problem:
    """Return the Problem for a checkpoint of `round_` (None: the latest) that does not exist: `file-lost` if the disk
    has lost it, `gone` if the retention rule has deleted checkpoints of that time, otherwise `not-found`."""
    found = sorted(session.scalars(select(CheckpointRow.round).where(CheckpointRow.run_id == run.id)))
    sound = [each for each in found if each not in run.outer.damaged_checkpoints]
    if (round_ is None and found and not sound) or round_ in run.outer.damaged_checkpoints:
        damage = run.outer.damaged_checkpoints[found[-1] if round_ is None else round_]
        there = ", ".join(map(str, sound[-CHECKPOINTS_NAMED:]))
        others = f"take another checkpoint ({there})" if sound else "wait for the next checkpoint"
        return Problem("file-lost", f"{damage}; {others}, or restore the data directory from a backup")
    if round_ is None or not found:
        return Problem("not-found", f"the run {run.name} has no checkpoint yet")
    if round_ < found[0]:
        return Problem(
            "gone", f"checkpoints below {found[0]} were deleted by the retention rule; recover from the latest one"
        )
    there = ", ".join(map(str, found[-CHECKPOINTS_NAMED:]))
    return Problem("not-found", f"the run {run.name} has no checkpoint {round_}; the latest are {there}")


def _checkpoint_fields(run: LiveRun, session: Session, row: CheckpointRow) -> dict[str, Any]:
    size = session.scalar(
        select(func.sum(CheckpointFragmentRow.size)).where(
            CheckpointFragmentRow.run_id == row.run_id, CheckpointFragmentRow.round == row.round
        )
    )
    return {
        "round": row.round,
        "created_at": row.created_at,
        "bytes": size or 0,
        "state_digest": row.state_digest.hex(),
        "damage": run.outer.damaged_checkpoints.get(row.round),
    }


def events(run: LiveRun, limit: int, after: int) -> Page[Event]:
    """Return the events with an id greater than `after`, oldest first."""
    with run.context.database.read() as session:
        query = select(EventRow).where(EventRow.run_id == run.id, EventRow.id > after).order_by(EventRow.id)
        rows = session.scalars(query.limit(limit + 1)).all()
    items = [Event(id=row.id, at=row.at, kind=row.kind, message=row.message, data=row.data) for row in rows[:limit]]
    return Page(items=items, next=str(items[-1].id) if len(rows) > limit else None)
