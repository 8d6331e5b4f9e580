"""Leases. A worker is live exactly while it holds a lease. Heartbeats renew it.

A lease ends at once when the worker leaves, is evicted or is banned. A tick ends it when it has run out, when the
worker's token is no longer good, or when the worker stays after the run is over.
"""

from collections.abc import Callable
from functools import partial

from coordinator.rounds import accounting
from coordinator.rounds.opening import status
from coordinator.run.live_run import Change, LiveRun
from coordinator.run.members import LINGER_S, SEEDER_S
from coordinator.run.units.ledger import return_units
from coordinator.store.identity import Actor
from protocol.errors import Problem
from protocol.messages import Directive, LeaseReply, LeaveRequest, Metrics, RunState, WorkerState

DIRECTIVES = {
    RunState.STOPPED: Directive.STOP,
    RunState.FINISHED: Directive.STOP,
    RunState.DRAINING: Directive.DRAIN,
}


def renew(run: LiveRun, worker: str, metrics: Metrics) -> LeaseReply:
    """Renew the lease of a live worker: a heartbeat. Raises Problem `unauthorized` if the lease has ended.

    Takes no lock and does not use the database.
    """
    if not run.members.renew(worker, run.context.clock(), metrics):
        raise _ended(worker)
    directive = DIRECTIVES.get(run.state, Directive.CONTINUE)
    if worker in run.members.stale:
        directive = Directive.STOP  # what it trains on is not the run's state any more
    return LeaseReply(directive=directive, reason=status(run), lease_s=run.members.lease_s)


def check_lease(run: LiveRun, worker: str) -> None:
    """Raise Problem `unauthorized` unless `worker` is live."""
    if worker not in run.members:
        raise _ended(worker)


def _ended(worker: str) -> Problem:
    return Problem("unauthorized", f"the lease of {worker} has ended; join again")


def leave(run: LiveRun, worker: str, request: LeaveRequest, operator: Actor | None = None) -> None:
    """End the worker's lease because it leaves, or because `operator` removes it. Its unused units return to the
    pool."""
    with run.lock:
        if operator is not None and worker not in run.members:
            raise Problem("not-found", f"the run {run.name} has no live worker {worker}")
        check_lease(run, worker)  # it may have ended while the request was on its way
        if request.report is not None:
            accounting.book_report(run, worker, request.report)
        with run.change() as change:
            end_lease(change, worker, WorkerState.LEFT, "left", request)
            if operator is not None:
                change.audit(operator, "worker-left", f"made the worker {worker} leave")


def end_lease(change: Change, worker: str, state: WorkerState, what: str, request: LeaveRequest | None = None) -> None:
    """End the worker's lease and return its unused units; those of a lost worker that may train on return later
    (`SyncSpec.kept_rounds`). `what`: the rest of the event's message, after the worker's name. `request`: the worker's
    own message on leaving, if there is one."""
    run, row = change.run, change.worker_row(worker)
    row.token_hash, row.state = None, state
    metrics = run.members.metrics(worker)
    if request is not None and "metrics" in request.model_fields_set:
        metrics = request.metrics
    row.metrics = metrics.model_dump(mode="json")
    if request is not None and request.state_digest is not None:
        row.state_round, row.state_digest = request.state_round, bytes.fromhex(request.state_digest)
    kept_rounds = run.spec.sync.kept_rounds if state is WorkerState.LOST else 0
    return_units(change.session, run.id, worker, before=run.round - kept_rounds if kept_rounds else None)
    change.record(str(state), f"{worker} {what}", worker=worker)
    finished = run.final_digest is not None and request is not None and request.state_round == run.round
    if finished and worker not in run.members.stale and row.state_digest != run.final_digest:
        row.divergences += 1
        change.row.divergences += 1
        change.record("diverged", f"{worker} left with a state that differs from the run's", worker=worker)

    change.after_commit(partial(run.members.leave, worker))
    if run.open is not None:
        change.after_commit(partial(run.open.leave, worker))
    change.wake()


# --- at every tick ----------------------------------------------------------------------------------------------------


def expire(run: LiveRun) -> None:
    """End the leases that have run out."""
    members, clock = run.members, run.context.clock
    with run.lock:
        for worker in members.expired(clock()):
            silent_s = members.last_seen_s(worker, clock())
            if silent_s is not None and silent_s > members.lease_s:  # a heartbeat may have arrived since
                message = f"was silent for {members.lease_s:.0f} s and is considered dead"
                with run.change() as change:
                    end_lease(change, worker, WorkerState.LOST, message)


def note_stalled(run: LiveRun) -> None:
    """Record an event for each worker that has begun to stall: its heartbeats hide it."""
    members = run.members
    with run.lock:
        stalled = members.stalled(run.context.clock())
        members.noted_stalled &= stalled.keys()
        for worker in sorted(stalled.keys() - members.noted_stalled):
            message = (
                f"{worker} sends heartbeats, and has taken no inner step for {stalled[worker]:.0f} s: once a quorum "
                "has contributed, rounds go on without it. Look at its process and its GPU, or start it again"
            )
            with run.change() as change:
                change.record("stalled", message, worker=worker)
                change.after_commit(partial(members.noted_stalled.add, worker))


def replace_silent_seeder(run: LiveRun) -> None:
    """Let another worker upload state 0 if the seeder has uploaded nothing for SEEDER_S seconds."""
    with run.lock:
        members, now = run.members, run.context.clock()
        if run.seeded or not members.seeder_is_silent(now):
            return
        with run.change() as change:
            message = f"{members.seeder} has uploaded nothing of state 0 for {SEEDER_S:.0f} s: another worker is asked"
            change.record("seeder-silent", message, worker=members.seeder)
            change.after_commit(partial(members.dismiss_seeder, now))
            change.wake()


def end_lingering(run: LiveRun) -> None:
    """Evict the members that still hold a lease LINGER_S seconds after the run has ended or was drained."""
    with run.lock:
        must_leave = run.ended or (run.state is RunState.DRAINING and run.open is None)
        if run.members.are_lingering(run.context.clock(), must_leave=must_leave):
            with run.change() as change:
                for worker in sorted(run.members.live()):
                    message = f"was evicted: the run is {run.state}, and it has not left for {LINGER_S:.0f} s"
                    end_lease(change, worker, WorkerState.EVICTED, message)


def end_without_token(run: LiveRun, is_good: Callable[[str], bool]) -> None:
    """End the leases of workers whose token was revoked or has expired. `is_good` takes the id of a token."""
    with run.lock:
        ended = run.members.with_invalid_token(is_good)
        if ended:
            with run.change() as change:
                for worker in ended:
                    message = "was evicted: its token was revoked, or has expired"
                    end_lease(change, worker, WorkerState.EVICTED, message)
