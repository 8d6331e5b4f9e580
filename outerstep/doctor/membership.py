"""What the worker may do: its token, the run to join, its name there, and what the run's spec asks for."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from outerstep import rest
from outerstep.common.quantities import duration_text
from outerstep.doctor.examination import Finding, fine, warning, wrong
from protocol.errors import Problem
from protocol.fragments import Layout
from protocol.messages import JOIN_PREFIX, RunDetail, RunState, WorkerInfo, WorkerState
from protocol.spec.run import RunSpec
from worker.allowing import Refusal, allowed_by, as_options, not_allowed
from worker.link.worker_token import token_to_read_with
from worker.settings import BoxSettings, WorkerSettings
from worker.state.state_dir import StateDir


class Access(Enum):
    WORKER = auto()
    ADMIN = auto()
    READING = auto()  # a viewer or member token
    NONE = auto()


_REFUSALS = {"unauthorized": Access.NONE, "forbidden": Access.READING}


def look_at_token(client: rest.Client) -> Access:
    """Return what the token allows. Raises what `rest.Client` raises, except refusals because of the token."""
    try:
        client.line_check_down(0)  # allowed for tokens that may join
    except Problem as problem:
        if problem.slug not in _REFUSALS:
            raise
        return _REFUSALS[problem.slug]
    try:
        next(iter(client.tokens()), None)
    except Problem as problem:
        if problem.slug == "forbidden":
            return Access.WORKER
        raise
    return Access.ADMIN


_NEW = "ask an admin for one: outerstep token create --scope join"


def judge_token(seen: Access) -> list[Finding]:
    match seen:
        case Access.WORKER:
            return [fine("token", "valid, and lets workers join")]
        case Access.ADMIN:
            said = "valid, but an admin token: anyone who reads it on this box may stop runs and create tokens"
            return [warning("token", said, f"the box only needs a join or worker token; {_NEW}")]
        case Access.READING:
            return [wrong("token", "valid, but read-only: it does not let workers join", _NEW)]
        case Access.NONE:
            return [wrong("token", "unknown to the coordinator, or revoked", _NEW)]


@dataclass(frozen=True)
class Run:
    """The run with its workers. `layout`: None until the run is seeded. `is_own`: the live worker with this name is
    this one, according to the member token in its state directory. `has_no_token`: this worker has a join token but no
    worker token yet."""

    detail: RunDetail
    workers: list[WorkerInfo]
    layout: Layout | None
    is_own: bool
    has_no_token: bool


def look_at_run(client: rest.Client, settings: WorkerSettings) -> Run:
    """Return the run as this worker sees it. Raises what `rest.Client` raises."""
    detail = client.run(settings.run)
    workers = client.workers(settings.run)
    live = any(each.name == settings.name and each.state is WorkerState.LIVE for each in workers)
    token = token_to_read_with(settings.token, settings.run, settings.name, settings.directory)
    is_own = live and _holds_lease(client, settings)
    return Run(detail, workers, _layout(client, settings.run), is_own, token.startswith(JOIN_PREFIX))


def _layout(client: rest.Client, run: str) -> Layout | None:
    try:
        return client.checkpoint(run).layout
    except Problem as problem:
        if problem.slug == "not-found":
            return None
        raise


def _holds_lease(client: rest.Client, settings: WorkerSettings) -> bool:
    try:
        saved = StateDir(settings.directory).member_tokens()
    except (OSError, ValueError, KeyError):
        return False
    for token in filter(None, (saved.current, saved.proposed)):
        headers = {"Authorization": f"Bearer {token}"}
        with client.http.stream("GET", f"/v1/runs/{settings.run}", headers=headers) as answer:
            if answer.is_success:  # a member token expires with its lease, and reading does not renew it
                return True
    return False


def judge_run(seen: Run) -> list[Finding]:
    run = seen.detail
    said = f"{run.name} is {run.state}: {run.reason}"
    if run.state in (RunState.FINISHED, RunState.STOPPED):
        return [wrong("run", said, "nothing is left to train: join another run, or create one")]
    live = [each.name for each in seen.workers if each.state is WorkerState.LIVE]
    said += f"; {len(live)} live {'worker' if len(live) == 1 else 'workers'}"
    said += f" ({', '.join(live[:8])}{', …' if len(live) > 8 else ''})" if live else ""
    if run.state in (RunState.PAUSED, RunState.DRAINING):
        remedy = f"a worker waits until the operator resumes it: outerstep run resume {run.name}"
        return [warning("run", said, remedy)]
    return [fine("run", said)]


def judge_name(seen: Run, name: str, host: str = platform.node()) -> list[Finding]:
    worker = _named(seen.workers, name)
    if worker is None:
        return [fine("name", f"{name} is free")]
    where = worker.host.get("host", "another machine")
    if worker.state is WorkerState.BANNED:
        remedy = f"only the operator can readmit it: outerstep run readmit {seen.detail.name} {name}"
        return [wrong("name", f"{name} was banned from the run", remedy)]
    if seen.has_no_token and worker.token is not None:
        said = f"{name} belongs to a token that is not in this worker's state directory"
        remedy = "use another --name, the --state that has the token, or ask an operator to release the name: "
        return [wrong("name", said, f"{remedy}outerstep run release {seen.detail.name} {name}")]
    if worker.state is not WorkerState.LIVE:
        return [fine("name", f"{name} was in the run before, on {where} ({worker.state})")]
    if seen.is_own:
        return [fine("name", f"{name} is this worker, and its lease has not ended: it will continue where it was")]
    heard = "" if worker.last_seen_s is None else f", last seen {duration_text(worker.last_seen_s)} ago"
    lease = seen.detail.spec.members.lease_s
    on = f"on this machine ({where})" if where == host else f"on {where}"
    said = f"{name} is the name of a live worker {on}{heard}"
    return [wrong("name", said, f"use another --name; if that worker is dead, wait {lease:.0f} s for its lease to end")]


def _named(workers: Sequence[WorkerInfo], name: str) -> WorkerInfo | None:
    return next((each for each in workers if each.name == name), None)


def look_at_permission(spec: RunSpec, settings: BoxSettings) -> list[Refusal]:
    """Return what the spec asks for that is not allowed here. Raises DataError for invalid places."""
    return not_allowed(spec, allowed_by(settings))


def judge_permission(seen: list[Refusal]) -> list[Finding]:
    if not seen:
        return [fine("allowed", "everything that the run's spec asks for is allowed here")]
    said = "; ".join(each.what for each in seen)
    return [wrong("allowed", said, f"if you trust the author of the spec, add: {as_options(seen)}")]
