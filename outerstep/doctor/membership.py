"""The run that is to be joined, and the place in it of a worker of this name."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass

from outerstep import rest
from outerstep.common.quantities import duration_text
from outerstep.doctor.finding import Finding, fine, warning, wrong
from protocol.errors import Problem
from protocol.fragments import Layout
from protocol.messages import JOIN_PREFIX, RunDetail, RunState, WorkerInfo, WorkerState
from worker.link.worker_token import token_to_read_with
from worker.settings import WorkerSettings
from worker.state.state_dir import StateDir


@dataclass(frozen=True)
class Run:
    """The run with its workers. `layout`: None as long as nobody has seeded it. `is_own`: the live worker of this name
    is this one, by the member token in its state directory. `has_no_token`: this one has a join token, and none of its
    own yet."""

    detail: RunDetail
    workers: list[WorkerInfo]
    layout: Layout | None
    is_own: bool
    has_no_token: bool


def look(client: rest.Client, settings: WorkerSettings) -> Run:
    """Raises what `rest.Client` does."""
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
            if answer.is_success:  # a member token ends with its lease, and reading renews none
                return True
    return False


def judge_run(seen: Run) -> list[Finding]:
    run = seen.detail
    said = f"{run.name} is {run.state}: {run.reason}"
    if run.state in (RunState.FINISHED, RunState.STOPPED):
        return [wrong("run", said, "there is nothing left to train: join another run, or have one made")]
    live = [each.name for each in seen.workers if each.state is WorkerState.LIVE]
    said += f"; {len(live)} live {'worker' if len(live) == 1 else 'workers'}"
    said += f" ({', '.join(live[:8])}{', …' if len(live) > 8 else ''})" if live else ""
    if run.state in (RunState.PAUSED, RunState.DRAINING):
        remedy = f"a worker waits until the operator lets it go on: outerstep run resume {run.name}"
        return [warning("run", said, remedy)]
    return [fine("run", said)]


def judge_name(seen: Run, name: str, host: str = platform.node()) -> list[Finding]:
    worker = _named(seen.workers, name)
    if worker is None:
        return [fine("name", f"{name} is free")]
    where = worker.host.get("host", "another machine")
    if worker.state is WorkerState.BANNED:
        remedy = f"only its operator lets it join again: outerstep run readmit {seen.detail.name} {name}"
        return [wrong("name", f"{name} was banned from the run", remedy)]
    if seen.has_no_token and worker.token is not None:
        said = f"{name} belongs to a token, and there is none in this worker's state directory to join with"
        remedy = "give another --name, the --state that has it, or have an operator give the name away: "
        return [wrong("name", said, f"{remedy}outerstep run release {seen.detail.name} {name}")]
    if worker.state is not WorkerState.LIVE:
        return [fine("name", f"{name} was in the run before, on {where} ({worker.state})")]
    if seen.is_own:
        return [fine("name", f"{name} is this worker, and its lease has not ended: it goes on where it was")]
    heard = "" if worker.last_seen_s is None else f", heard of {duration_text(worker.last_seen_s)} ago"
    lease = seen.detail.spec.members.lease_s
    on = f"on this machine ({where})" if where == host else f"on {where}"
    said = f"{name} is the name of a live worker {on}{heard}"
    return [wrong("name", said, f"give another --name; if that one is dead, wait {lease:.0f} s for its lease to end")]


def _named(workers: Sequence[WorkerInfo], name: str) -> WorkerInfo | None:
    return next((each for each in workers if each.name == name), None)
