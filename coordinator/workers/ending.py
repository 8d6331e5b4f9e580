"""How leases end. What only time brings about is looked for at every tick: silence, a token that is good no more, and
members that do not leave; then a seeder that does nothing is replaced as well."""

from collections.abc import Callable
from functools import partial

from coordinator.run.live_run import Change, LiveRun
from coordinator.run.members import LINGER_S, SEEDER_S
from coordinator.units.ledger import return_units
from protocol.messages import LeaveRequest, RunState, WorkerState


def expire(run: LiveRun) -> None:
    """End the leases that ran out."""
    members, clock = run.members, run.world.clock
    with run.lock:
        for worker in members.expired(clock()):
            silent_s = members.last_seen_s(worker, clock())
            if silent_s is not None and silent_s > members.lease_s:  # it may have been heard of since the list was made
                message = f"was silent for {members.lease_s:.0f} s and is taken for dead"
                with run.change() as change:
                    end_lease(change, worker, WorkerState.LOST, message)


def replace_silent_seeder(run: LiveRun) -> None:
    """Let somebody else upload state 0 where the worker that was asked to has done nothing of it for too long."""
    with run.lock:
        members, now = run.members, run.world.clock()
        if run.seeded or not members.seeder_is_silent(now):
            return
        with run.change() as change:
            message = f"{members.seeder} has uploaded nothing of state 0 for {SEEDER_S:.0f} s: another worker is asked"
            change.record("seeder-silent", message, worker=members.seeder)
            change.then(partial(members.dismiss_seeder, now))
            change.wake()


def end_lingering(run: LiveRun) -> None:
    """End the leases of the members that have not left a run which is over, or draining without an open round."""
    with run.lock:
        sent_home = run.ended or (run.state is RunState.DRAINING and run.open is None)
        if run.members.linger(run.world.clock(), sent_home=sent_home):
            with run.change() as change:
                for worker in sorted(run.members.live()):
                    message = f"was evicted: the run is {run.state}, and it has not left for {LINGER_S:.0f} s"
                    end_lease(change, worker, WorkerState.EVICTED, message)


def end_without_token(run: LiveRun, is_good: Callable[[str], bool]) -> None:
    """End the leases of the workers whose token was revoked, or has expired."""
    with run.lock:
        ended = run.members.joined_without(is_good)
        if ended:
            with run.change() as change:
                for worker in ended:
                    message = "was evicted: its token was revoked, or has expired"
                    end_lease(change, worker, WorkerState.EVICTED, message)


def end_lease(change: Change, worker: str, state: WorkerState, what: str, request: LeaveRequest | None = None) -> None:
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
