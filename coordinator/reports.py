"""What the REST interface shows of a run: replies built from the database and from the run in memory."""

from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from coordinator.runs import held_out
from coordinator.runs.live_run import LiveRun
from coordinator.runs.open_round import OpenFragment, OpenRound
from coordinator.runs.opening import status
from coordinator.runs.steps import expected_rounds
from coordinator.store.blobs import KINDS
from coordinator.store.tables import (
    CheckpointFragmentRow,
    CheckpointRow,
    EvaluationRow,
    EventRow,
    FragmentRow,
    LateContributionRow,
    RoundRow,
    RunRow,
    WorkerRow,
)
from coordinator.sync import checkpointing, retention
from coordinator.workers import accounting
from protocol.errors import Problem
from protocol.messages import (
    Account,
    CheckpointDetail,
    CheckpointInfo,
    DiskBytes,
    Evaluation,
    Event,
    FragmentInfo,
    FragmentState,
    LateContribution,
    Metrics,
    Page,
    RoundDetail,
    RoundInfo,
    RunDetail,
    RunInfo,
    RunState,
    WorkerInfo,
    WorkerState,
)

CHECKPOINTS_NAMED = 5
ADVANCEMENT = list(FragmentState)


def run_info(run: LiveRun) -> RunInfo:
    """Return what a list of runs shows of the run."""
    return RunInfo(**_run_fields(run))


def run_detail(run: LiveRun) -> RunDetail:
    """Return the run with its parsed spec and the bytes of its files."""
    return RunDetail(**_run_fields(run), spec=run.spec, disk_bytes=_disk_bytes(run))


def spec_toml(run: LiveRun) -> str:
    """Return the run's spec as it was given."""
    with run.world.database.read() as session:
        return session.get_one(RunRow, run.id).spec_toml


def _disk_bytes(run: LiveRun) -> DiskBytes:
    def stored(prefix: str) -> int:
        return sum(size for _, size in run.blobs.list(prefix))

    names = run.names
    return DiskBytes(
        **{kind: stored(names.kind(kind)) for kind in KINDS},
        state=run.outer.files.bytes(),
        set_aside=stored(names.set_aside),
    )


def _run_fields(run: LiveRun) -> dict[str, Any]:
    with run.world.database.read() as session:
        row = session.get_one(RunRow, run.id)
        stored: dict[str, Any] = {
            "spec_digest": row.spec_digest.hex(),
            "created_at": row.created_at,
            "tokens": row.tokens,
            "upload_bytes": row.upload_bytes,
            "divergences": row.divergences,
            "account": Account.model_validate(row.account),
        }
        evaluated = session.scalar(select(func.max(EvaluationRow.round)).where(EvaluationRow.run_id == run.id))
        stored |= _held_out(session, run, evaluated)
    with run.lock:
        seeding = run.state is RunState.RUNNING and not run.seeded
        final = run.final_digest
        return {
            "name": run.name,
            "state": RunState.SEEDING if seeding else run.state,
            "reason": _reason(run),
            "round": run.round,
            "rounds": expected_rounds(run),
            "step": run.step,
            "live_workers": len(run.members),
            "fragments": None if run.model is None else len(run.model.layout.fragments),
            "elements": None if run.model is None else run.model.layout.total_elements,
            "data": None if run.model is None else run.model.data,
            "frozen": None if run.model is None else run.model.frozen,
            **stored,
            "state_digest": None if final is None else final.hex(),
        }


def _reason(run: LiveRun) -> str:
    if run.ended:
        return f"the run is {run.state} after {run.round} of {expected_rounds(run)} rounds"
    if run.outer.damage is not None:
        return run.outer.damage
    if run.open is None:
        return status(run)
    return f"round {run.round}: {_least_advanced(run, run.open)[1]}"


def _least_advanced(run: LiveRun, opening: OpenRound) -> tuple[FragmentState, str]:
    """Return state and reason of the open round: those of its least advanced fragment."""
    fragment = min(opening.fragments, key=lambda each: ADVANCEMENT.index(each.state))
    return fragment.state, _fragment_reason(run, fragment)


def _fragment_reason(run: LiveRun, fragment: OpenFragment) -> str:
    """Return what a fragment of the open round waits for; after a stop, that it was given up."""
    given_up = run.state is RunState.STOPPED and fragment.state is not FragmentState.PUBLISHED
    return "given up: the run was stopped" if given_up else fragment.reason


def rounds(run: LiveRun, limit: int, before: int | None) -> Page[RoundInfo]:
    """Return the rounds before `before` (None: all), newest first."""
    with run.lock, run.world.database.read() as session:
        query = select(RoundRow).where(RoundRow.run_id == run.id).order_by(RoundRow.round.desc()).limit(limit + 1)
        if before is not None:
            query = query.where(RoundRow.round < before)
        rows = session.scalars(query).all()
        items = [RoundInfo(**_round_fields(run, session, row)) for row in rows[:limit]]
    return Page(items=items, next=str(items[-1].round) if len(rows) > limit else None)


def round_detail(run: LiveRun, number: int) -> RoundDetail:
    """Return a round and its fragments. Problem `not-found` if it was not opened."""
    with run.lock, run.world.database.read() as session:
        row = session.get(RoundRow, (run.id, number))
        if row is None:
            raise Problem("not-found", f"round {number} of the run {run.name} was not opened: {_reason(run)}")
        fragments = [
            _fragment(run, each)
            for each in session.scalars(
                select(FragmentRow)
                .where(FragmentRow.run_id == run.id, FragmentRow.round == number)
                .order_by(FragmentRow.fragment)
            )
        ]
        late = session.scalars(
            select(LateContributionRow)
            .where(LateContributionRow.run_id == run.id, LateContributionRow.round == number)
            .order_by(LateContributionRow.worker, LateContributionRow.fragment)
        )
        return RoundDetail(
            **_round_fields(run, session, row),
            fragments=fragments,
            evaluations=_by_worker(held_out.evaluations(session, run.id, number)),
            accounts=accounting.by_worker(session, run.id, number),
            late=[LateContribution(worker=each.worker, fragment=each.fragment, late_s=each.late_s) for each in late],
        )


def _round_fields(run: LiveRun, session: Session, row: RoundRow) -> dict[str, Any]:
    tokens, loss, upload_bytes, delta_bytes = (
        retention.sums(session, run.id, row.round)
        if row.tokens is None
        else (row.tokens, row.loss, row.upload_bytes, row.delta_bytes)
    )
    quorum_at, collected_at, aggregated_at = (
        retention.latest(session, run.id, row.round)
        if row.tokens is None
        else (row.quorum_at, row.collected_at, row.aggregated_at)
    )
    state, reason = FragmentState.PUBLISHED, "published"
    if run.open is not None and run.open.number == row.round:
        state, reason = _least_advanced(run, run.open)
    return {
        "round": row.round,
        "state": state,
        "reason": reason,
        "opened_at": row.opened_at,
        "quorum_at": quorum_at,
        "collected_at": collected_at,
        "aggregated_at": aggregated_at,
        "closed_at": row.closed_at,
        "tokens": tokens,
        "loss": loss,
        **_held_out(session, run, row.round),
        "upload_bytes": upload_bytes,
        "delta_bytes": delta_bytes,
        "account": Account.model_validate(row.account),
    }


def _by_worker(measured: dict[str, Evaluation]) -> dict[str, Evaluation]:
    return {worker: each for worker, each in measured.items() if worker != held_out.ALL}


def _held_out(session: Session, run: LiveRun, round_: int | None) -> dict[str, Any]:
    """Return what is shown of the held-out loss of state `round_` (None: of no state)."""
    measured = {} if round_ is None else held_out.evaluations(session, run.id, round_)
    mean = held_out.mean(measured.values())
    return {
        "held_out_loss": None if mean is None else mean.loss,
        "held_out_bits_per_byte": None if mean is None else mean.bits_per_byte,
    }


def _fragment(run: LiveRun, row: FragmentRow) -> FragmentInfo:
    contributors, reason, closes_in_s = row.contributors or {}, row.reason, None
    if run.open is not None and run.open.number == row.round:
        fragment = run.open.fragments[row.fragment]
        contributors, reason = fragment.contributed, _fragment_reason(run, fragment)
        if fragment.closes_at is not None and run.state is not RunState.STOPPED:
            closes_in_s = max(0.0, fragment.closes_at - run.world.clock())
    return FragmentInfo(
        fragment=row.fragment,
        state=FragmentState(row.state),
        reason=reason,
        contributors=sorted(contributors),
        closes_in_s=closes_in_s,
        quorum_at=row.quorum_at,
        closed_at=row.closed_at,
        aggregated_at=row.aggregated_at,
        published_at=row.published_at,
        delta_bytes=row.delta_bytes,
        delta_digest=None if row.delta_digest is None else row.delta_digest.hex(),
    )


def workers(run: LiveRun, limit: int, after: str | None) -> Page[WorkerInfo]:
    """Return the workers with a name above `after` (None: all), by name."""
    with run.lock, run.world.database.read() as session:
        query = select(WorkerRow).where(WorkerRow.run_id == run.id).order_by(WorkerRow.name).limit(limit + 1)
        if after is not None:
            query = query.where(WorkerRow.name > after)
        rows = session.scalars(query).all()
        items = [_worker(run, row) for row in rows[:limit]]
    return Page(items=items, next=items[-1].name if len(rows) > limit else None)


def worker(run: LiveRun, name: str) -> WorkerInfo:
    """Return a worker of the run, live or not. Problem `not-found` if it never joined."""
    with run.lock, run.world.database.read() as session:
        row = session.scalars(select(WorkerRow).where(WorkerRow.run_id == run.id, WorkerRow.name == name)).one_or_none()
        if row is None:
            raise Problem("not-found", f"the run {run.name} never had a worker {name}")
        return _worker(run, row)


def _worker(run: LiveRun, row: WorkerRow) -> WorkerInfo:
    live = row.name in run.members
    return WorkerInfo(
        name=row.name,
        state=WorkerState(row.state),
        epoch=row.epoch,
        joined_at=row.joined_at,
        last_seen_s=run.members.last_seen_s(row.name, run.world.clock()),
        host=row.host,
        metrics=run.members.metrics(row.name) if live else Metrics.model_validate(row.metrics),
        contributions=row.contributions,
        tokens=row.tokens,
        upload_bytes=row.upload_bytes,
        account=Account.model_validate(row.account),
        divergences=row.divergences,
        state_round=row.state_round,
        state_digest=None if row.state_digest is None else row.state_digest.hex(),
    )


def checkpoints(run: LiveRun, limit: int, before: int | None) -> Page[CheckpointInfo]:
    """Return the checkpoints before `before` (None: all), newest first."""
    with run.world.database.read() as session:
        query = select(CheckpointRow).where(CheckpointRow.run_id == run.id).order_by(CheckpointRow.round.desc())
        if before is not None:
            query = query.where(CheckpointRow.round < before)
        rows = session.scalars(query.limit(limit + 1)).all()
        items = [CheckpointInfo(**_checkpoint_fields(session, row)) for row in rows[:limit]]
    return Page(items=items, next=str(items[-1].round) if len(rows) > limit else None)


def checkpoint_detail(run: LiveRun, round_: int | None) -> CheckpointDetail:
    """Return the checkpoint of `round_` (None: the latest)."""
    with run.world.database.read() as session:
        query = (
            select(CheckpointRow).where(CheckpointRow.run_id == run.id).order_by(CheckpointRow.round.desc()).limit(1)
        )
        if round_ is not None:
            query = query.where(CheckpointRow.round == round_)
        row = session.scalars(query).one_or_none()
        if row is None or run.model is None:
            raise _no_checkpoint(run, session, round_)
        fragments = session.scalars(
            select(CheckpointFragmentRow)
            .where(CheckpointFragmentRow.run_id == run.id, CheckpointFragmentRow.round == row.round)
            .order_by(CheckpointFragmentRow.fragment)
        )
        return CheckpointDetail(
            **_checkpoint_fields(session, row),
            layout=run.model.layout,
            fragments=[checkpointing.describe(each, run.model.layout) for each in fragments],
        )


def checkpoint_digest(run: LiveRun, round_: int, fragment: int) -> bytes:
    """Return the digest of a fragment of the checkpoint of `round_`. Problem `gone` or `not-found` if there is none."""
    with run.world.database.read() as session:
        row = session.get(CheckpointFragmentRow, (run.id, round_, fragment))
        if row is None:
            raise _no_checkpoint(run, session, round_)
        return row.digest


def _no_checkpoint(run: LiveRun, session: Session, round_: int | None) -> Problem:
    """Return the Problem that there is no checkpoint of `round_` (None: none at all): `gone` if the retention rule has
    deleted those of so early states, otherwise `not-found`."""
    found = sorted(session.scalars(select(CheckpointRow.round).where(CheckpointRow.run_id == run.id)))
    if round_ is None or not found:
        return Problem("not-found", f"the run {run.name} has no checkpoint yet")
    if round_ < found[0]:
        return Problem(
            "gone", f"checkpoints below {found[0]} were deleted by the retention rule; recover from the latest one"
        )
    there = ", ".join(map(str, found[-CHECKPOINTS_NAMED:]))
    return Problem("not-found", f"the run {run.name} has no checkpoint {round_}; the latest are {there}")


def _checkpoint_fields(session: Session, row: CheckpointRow) -> dict[str, Any]:
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
    }


def events(run: LiveRun, limit: int, after: int) -> Page[Event]:
    """Return the events with an id above `after`, oldest first."""
    with run.world.database.read() as session:
        query = select(EventRow).where(EventRow.run_id == run.id, EventRow.id > after).order_by(EventRow.id)
        rows = session.scalars(query.limit(limit + 1)).all()
    items = [Event(id=row.id, at=row.at, kind=row.kind, message=row.message, data=row.data) for row in rows[:limit]]
    return Page(items=items, next=str(items[-1].id) if len(rows) > limit else None)
