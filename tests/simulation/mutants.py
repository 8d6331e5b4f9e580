"""Bugs, planted one at a time, that the simulation must find: each breaks the mechanism behind one invariant.

A mutant is a list of replacements: (where it lies, its name there, what is there instead). `seed` is one that is known
to find it, so that the proof is quick; the test looks through the first 500 where it no longer does.
"""

import inspect
import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from sqlalchemy import Connection, select, update
from sqlalchemy.orm import Session

from coordinator.aggregation import aggregator, judging, queue
from coordinator.aggregation import fragment as aggregating
from coordinator.aggregation.fragment import Delta
from coordinator.aggregation.residual import Residual
from coordinator.aggregation.tasks import Aggregate, Aggregated, Blob, Collected, Lateness
from coordinator.rounds import assigning, closing, leases, opening
from coordinator.run import open_round, schedule
from coordinator.run.live_run import LiveRun
from coordinator.run.members import Members
from coordinator.run.open_round import OpenRound
from coordinator.run.outer import State
from coordinator.run.units import ledger, pools
from coordinator.store import database, lease
from coordinator.store.blobs import Blobs, DirectAccess, Kind, RunNames
from coordinator.store.database import Fence, superseded
from coordinator.store.directory_blobs import DirectoryBlobs
from coordinator.store.lease import Leader
from coordinator.store.payloads import MemoryBudget
from coordinator.store.tables import CheckpointFragmentRow, LeaderRow, UnitRangeRow, WorkerRow
from coordinator.sync import (
    admission,
    checkpointing,
    contributing,
    delegating,
    direct_uploads,
    outer_state,
    publishing,
    retention,
)
from coordinator.trust import leaving_out
from coordinator.upkeep import redoing
from outerstep.common import files
from outerstep.common.ranges import Range
from protocol.digest import Buffer, digest
from protocol.errors import Problem
from protocol.messages import DirectUpload, FragmentState, Metrics
from protocol.spec.sections import MembersSpec
from protocol.wire import Payload
from tests.simulation.cluster import SharedCoordinator
from tests.simulation.world.database import EPOCH, DatabaseNode, shared_engines
from tests.simulation.world.store import StoredObject, StoreNode
from worker.rounds import round as round_
from worker.rounds import rounds
from worker.rounds.exchange import Exchange
from worker.state import outer_state as worker_outer_state
from worker.state import snapshot
from worker.state.fragments import Fragments
from worker.state.work import Contribution, Late, Missed, RoundStart

Replacement = tuple[Any, str, Any]


@dataclass(frozen=True)
class Mutant:
    """A planted bug, the invariants that it may break, and a seed that finds it."""

    what: str
    breaks: tuple[str, ...]
    seed: int
    replacements: Callable[[], list[Replacement]]


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The bug is in the code while the block runs."""
    with ExitStack() as patches:
        for owner, name, value in mutant.replacements():
            if not hasattr(owner, name):  # a builtin function, which the module must call for this to be a bug
                assert f"{name}(" in inspect.getsource(owner), f"{owner.__name__} does not use {name}"
            patches.enter_context(patch.object(owner, name, value))
        yield


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _put_without_fsync(kind: Kind, *, of_the_folder_only: bool = False) -> list[Replacement]:
    real = DirectoryBlobs.put

    def put(self: DirectoryBlobs, name: str, source: Buffer | Path) -> bool:
        final = self.root / name
        if kind not in name.split("/") or final.exists():
            return real(self, name, source)
        final.parent.mkdir(parents=True, exist_ok=True)
        final.write_bytes(source.read_bytes() if isinstance(source, Path) else source)
        if of_the_folder_only:
            files.fsync(final)
        return True

    return [(DirectoryBlobs, "put", put)]


def _acknowledge_before_fsync() -> list[Replacement]:
    return _put_without_fsync("contributions")


def _acknowledge_before_the_folder_is_durable() -> list[Replacement]:
    return _put_without_fsync("contributions", of_the_folder_only=True)


def _publish_before_it_is_durable() -> list[Replacement]:
    return _put_without_fsync("deltas")


def _another_order() -> list[Replacement]:
    return [(aggregating, "sorted", partial(sorted, reverse=True))]


def _other_contributors_after_a_restart() -> list[Replacement]:
    real = LiveRun.restored

    def forget_one(self: LiveRun, opening: OpenRound | None = None) -> None:
        for fragment in opening.fragments if opening else []:
            if fragment.state is FragmentState.AGGREGATING and len(fragment.contributed) > 1:
                fragment.contributed.pop(min(fragment.contributed))
        real(self, opening)

    return [(LiveRun, "restored", forget_one)]


class _Sticky(dict[bytes, str]):
    """Never forgets a token."""

    pop = _nothing  # type: ignore[assignment]


def _stale_tokens_work() -> list[Replacement]:
    real, init = Members.renew, Members.__init__

    def with_sticky_tokens(self: Members, *args: Any) -> None:
        init(self, *args)
        self._by_token_hash = _Sticky()

    def renew(self: Members, worker: str, now: float, metrics: Metrics) -> bool:
        if not real(self, worker, now, metrics):
            self.join(worker, b"", now, metrics)
        return True

    return [
        (Members, "__init__", with_sticky_tokens),
        (leases, "check_lease", _nothing),
        (Members, "renew", renew),
    ]


def _no_rebase() -> list[Replacement]:
    real, gradient = Fragments.rebase, Fragments.pseudo_gradient

    def without(self: Fragments, p: int, theta: torch.Tensor, carry: object = None, *rest: Any) -> torch.Tensor:
        return gradient(self, p, theta, None, *rest)

    return [
        (Fragments, "rebase", lambda self, p, theta, carry, **how: real(self, p, theta, None, **how)),
        (Fragments, "pseudo_gradient", without),
    ]


def _carries_what_the_mean_has() -> list[Replacement]:
    real = Contribution.missed

    def whole(self: Contribution, missed: Missed) -> Late:
        return real(self, Missed(torch.zeros_like(missed.mean), missed.share))

    return [(Contribution, "missed", whole)]


def _drops_what_was_trained_meanwhile() -> list[Replacement]:
    return [(Fragments, "progress_since", lambda self, p, local: torch.zeros_like(local))]


def _drops_what_the_codec_leaves_out() -> list[Replacement]:
    return [(Exchange, "unsent", _nothing)]


def _forgets_units() -> list[Replacement]:
    return [(where, "units_left", lambda named, consumed: []) for where in (round_, rounds)]


def _forgets_what_was_trained_beyond_h() -> list[Replacement]:
    """The snapshot of a round's start lacks the units that were used since the last contribution."""
    real = snapshot.load

    def load(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        if found is None or not isinstance(found.work, RoundStart):
            return found
        return replace(found, work=replace(found.work, carry=replace(found.work.carry, units=[])))

    return [(snapshot, "load", load)]


def _carried_work_without_weight() -> list[Replacement]:
    real = round_.Round.settle

    def settle(self: round_.Round) -> Any:
        carry, arrival = real(self)
        return replace(carry, fresh={}), arrival

    return [(round_.Round, "settle", settle)]


def _deals_units_twice() -> list[Replacement]:
    """Of what a worker is dealt ahead, the last part is dealt to the next one again."""
    real = ledger.deal_units

    def deal(session: Session, of: Mapping[str, pools.Pool], round_: int, counts: Mapping[str, int]) -> Any:
        dealt: dict[str, list[Range]] = {}
        for worker, count in counts.items():
            before = of[worker].row.next_unit
            dealt |= real(session, of, round_, {worker: count})
            if of[worker].row.next_unit > before + 1:
                of[worker].row.next_unit -= 1
        return dealt

    return [(opening, "deal_units", deal)]


def _passes_over_the_pool() -> list[Replacement]:
    def deal(
        session: Session, of: Mapping[str, pools.Pool], round_: int, counts: Mapping[str, int]
    ) -> dict[str, list[Range]]:
        dealt: dict[str, list[Range]] = {}
        for worker, count in counts.items():
            pool = of[worker]
            start, stop = pool.next, pool.next + count
            pool.row.next_unit += count
            row = UnitRangeRow(run_id=pool.run_id, start=start, stop=stop, state="assigned")
            row.worker, row.round = worker, round_
            session.add(row)
            dealt[worker] = [(start, stop)]
        return dealt

    return [(opening, "deal_units", deal)]


def _no_units_returned() -> list[Replacement]:
    return [(leases, "return_units", _nothing)]


def _weighs_stale_work_more() -> list[Replacement]:
    whole = vars(round_.Round)["_contribution"]

    def contribution(self: round_.Round, p: int, local: Any = None) -> Any:
        make, stale = whole(self, p, local), self._stale
        return lambda: replace(made := make(), weight=made.weight + stale)

    return [(round_.Round, "_contribution", contribution)]


def _forgotten_units_kept() -> list[Replacement]:
    return [(assigning, "return_forgotten_units", _nothing)]


def _carries_whatever_it_says() -> list[Replacement]:
    return [(assigning, "reclaim_units", _nothing)]


def _one_pool_for_all() -> list[Replacement]:
    real = pools.pools_of

    def of_the_first(session: Any, run: LiveRun, workers: Any) -> dict[str, Any]:
        first = session.query(WorkerRow).filter_by(run_id=run.id, place=0).one().name
        return dict.fromkeys(workers, real(session, run, [first])[first])

    return [(where, "pools_of", of_the_first) for where in (opening, assigning)]


def _units_consumed_elsewhere() -> list[Replacement]:
    return [(contributing, "consume_units", lambda session, run_id, worker, round_, units: 0)]


def _trusts_its_state_file() -> list[Replacement]:
    return [(outer_state, "has_state_digest", lambda path, digest: path.exists())]


def _fused_outer_step() -> list[Replacement]:
    def step(codec: Any, data: Any, theta: Any, momentum: Any, *, learning_rate: float, beta: float) -> None:
        delta = torch.empty(len(theta))
        codec.decode(data, delta.numpy())
        u = torch.from_numpy(momentum).mul_(beta).add_(delta)
        torch.from_numpy(theta).sub_(delta.add(u, alpha=beta), alpha=learning_rate)

    return [(worker_outer_state, "outer_step_by", step)]


def _never_tries_again() -> list[Replacement]:
    return [(publishing, "RETRY_S", math.inf)]


def _leases_never_end() -> list[Replacement]:
    return [(Members, "expired", lambda self, now: [])]


def _waits_for_a_hung_member() -> list[Replacement]:
    def has_quorum(expected: Set[str], contributed: Set[str], policy: MembersSpec, owners: Mapping[str, str]) -> bool:
        return expected <= contributed

    return [(open_round, "has_quorum", has_quorum)]


def _forgets_its_workers() -> list[Replacement]:
    real = LiveRun.restored

    def alone(self: LiveRun, opening: OpenRound | None = None) -> None:
        self.members = Members(self.spec.members.lease_s)
        real(self, opening)

    return [(LiveRun, "restored", alone)]


def _counts_short_rounds_as_whole() -> list[Replacement]:
    return [(publishing, "steps_trained", lambda run, session: schedule.round_steps(run))]


def _takes_any_weight() -> list[Replacement]:
    return [(admission, "_check_weight", lambda *_: 0)]


def _outweighed_by_one() -> list[Replacement]:
    return [(closing, "weights", lambda tokens, sync: dict(tokens))]


def _believes_every_contribution() -> list[Replacement]:
    def judge(evidence: Mapping[str, Any], *_: Any, **__: Any) -> judging.Judgement:
        return judging.Judgement(None, {worker: judging.Verdict(1.0) for worker in evidence})

    return [(aggregating, "judge", judge)]


def _writes_the_row_before_the_blob() -> list[Replacement]:
    real = contributing.commit_blob

    def commit_blob(run: LiveRun, arrival: Any, write: Callable[[], object]) -> bool:
        created = real(run, arrival, _nothing)
        write()
        return created

    return [(where, "commit_blob", commit_blob) for where in (contributing, direct_uploads)]


def _signs_uploads_of_any_bytes() -> list[Replacement]:
    def uploaded(
        self: StoreNode, name: str, signed: object, request: object, body: bytes
    ) -> tuple[int, list[Any], bytes]:
        self.objects[name] = StoredObject(body, 0.0)
        return 200, [], b""

    return [(StoreNode, "_uploaded", uploaded)]


def _commits_without_a_checksum() -> list[Replacement]:
    def confirm(access: DirectAccess, name: str, upload: DirectUpload) -> None:
        if access.uploaded(name) is None:
            raise Problem("not-uploaded", "there is nothing")

    return [(direct_uploads, "_confirm", confirm)]


def _deletes_before_the_checkpoint_is_complete() -> list[Replacement]:
    real, complete = checkpointing.record_fragment, retention.complete_checkpoints
    deleting = threading.local()  # a simulated crash may end the thread within

    def begun(run: LiveRun) -> list[int]:
        if not getattr(deleting, "now", False):
            return complete(run)
        with run.context.database.read() as session:
            rounds = session.scalars(select(CheckpointFragmentRow.round).distinct()).all()
        return sorted(rounds, reverse=True)

    def record_fragment(run: LiveRun, fragment: int, state: State, blob: Blob) -> CheckpointFragmentRow:
        row = real(run, fragment, state, blob)
        if state.round > 0:
            deleting.now = True
            try:
                retention.clean(run)
            finally:
                deleting.now = False
        return row

    return [(checkpointing, "record_fragment", record_fragment), (retention, "complete_checkpoints", begun)]


# --- rounds that are done again ---------------------------------------------------------------------------------------


def _leaves_out_whom_one_accuses() -> list[Replacement]:
    def agreed(found: Mapping[str, Collection[str]], owners: Mapping[str, str]) -> set[str]:
        return set().union(*found.values()) & owners.keys()

    return [(leaving_out, "agreed", agreed)]


def _keeps_the_units_of_a_dropped_round() -> list[Replacement]:
    return [(redoing, "return_since", lambda session, run_id, round_: [])]


class _Trusting(set[str]):
    """Adds nobody."""

    update = _nothing


def _takes_the_dropped_state_for_the_new_one() -> list[Replacement]:
    init = Members.__init__

    def with_trust(self: Members, *args: Any) -> None:
        init(self, *args)
        self.stale = _Trusting()

    return [(Members, "__init__", with_trust)]


def _judges_old_work_by_its_weight() -> list[Replacement]:
    return [(Lateness, "_replace", lambda self, units: self)]


# --- several coordinators, and aggregators ----------------------------------------------------------------------------


def _writes_whoever_leads() -> list[Replacement]:
    return [(Fence, "check", _nothing)]


def _two_lead_with_one_token() -> list[Replacement]:
    def take(connection: Connection, holder: str, address: str) -> int:
        expires_at = lease.database_clock() + lease.LEASE_S
        connection.execute(update(LeaderRow).values(holder=holder, address=address, expires_at=expires_at))
        token: int = connection.execute(select(LeaderRow.token)).scalar_one()
        return token

    return [(lease, "take", take), (Leader, "is_vacant", True)]


def _reads_the_token_before_the_transaction() -> list[Replacement]:
    real = DatabaseNode.request

    def request(self: DatabaseNode, *, writing: bool = False) -> None:
        coordinator = self.machine_of(self.scheduler.current.group)
        terms = coordinator.terms if isinstance(coordinator, SharedCoordinator) else None
        if terms is not None and terms.election.fence is not None and not self.scheduler.current.group.indivisible:
            with shared_engines(self.url)[0].connect() as connection:
                newest = connection.execute(select(LeaderRow.token)).scalar_one()
            if newest != terms.election.fence.token:
                terms.election.fence.end()
        real(self, writing=writing)

    def check(self: Fence, session: Session) -> None:
        if self.lost.is_set():
            raise superseded()

    return [(DatabaseNode, "request", request), (Fence, "check", check)]


def _drops_what_deltas_leave_out() -> list[Replacement]:
    real = aggregating.residual_of

    def residual(collected: Collected, blobs: Blobs) -> Residual | None:
        return real(collected.model_copy(update={"residual": None}), blobs)

    return [(aggregating, "residual_of", residual)]


def _reports_a_delta_before_it_is_stored() -> list[Replacement]:
    def store_delta(task: Aggregate, delta: Delta, blobs: Blobs, memory: MemoryBudget) -> Aggregated:
        found = digest(delta.content)
        name = RunNames(task.run).delta(task.round, task.fragment, found)
        vars(aggregator)["threading"].Thread(target=blobs.put, args=(name, delta.content)).start()
        memory.add_delta(found, delta.content)
        return Aggregated.of(delta.judgement, delta.invalid, found, Payload.from_bytes(delta.content), None)

    return [(aggregator, "store_delta", store_delta), (delegating, "_wrong_delta", lambda *_: "")]


def _leases_by_the_local_clock() -> list[Replacement]:
    def clock(self: DatabaseNode) -> float:
        return EPOCH + self.scheduler.now + self.scheduler.current.group.skew_s

    return [(DatabaseNode, "clock", clock)]


def _tasks_without_a_lease() -> list[Replacement]:
    return [(queue, "LEASE_S", math.inf)]


def _leads_on_after_a_lost_reply() -> list[Replacement]:
    return [(database, "fault_of", _nothing)]


# An honest worker ends for good: here, as its contribution weighs more than the units that it still holds.
REFUSED = "unexpected: AssertionError: I5"

MUTANTS = [
    Mutant("acknowledges a contribution before it is fsynced", ("I2",), 5, _acknowledge_before_fsync),
    Mutant("acknowledges before the folder is fsynced", ("I2",), 5, _acknowledge_before_the_folder_is_durable),
    Mutant("publishes a delta before it is durable", ("I1",), 2, _publish_before_it_is_durable),
    Mutant("sums in another order than that of worker ids", ("I2",), 1, _another_order),
    Mutant("aggregates other contributors after a restart", ("I2", "I4"), 8, _other_contributors_after_a_restart),
    Mutant("forgets its workers in a restart", ("I4",), 5, _forgets_its_workers),
    Mutant("lets stale member tokens in", ("I4", "I7"), 1, _stale_tokens_work),
    Mutant("drops the rebase of late work", ("I6",), 2, _no_rebase),
    Mutant("carries all of late work, as if the mean had none of it", ("I6",), 1, _carries_what_the_mean_has),
    Mutant("drops what was trained while a fragment travelled", ("I6",), 3, _drops_what_was_trained_meanwhile),
    Mutant("drops what the codec leaves out", ("I6",), 0, _drops_what_the_codec_leaves_out),
    Mutant("drops what deltas leave out", ("I2",), 12, _drops_what_deltas_leave_out),
    Mutant("forgets units that no fragment has named", ("I6", "I9", REFUSED), 23, _forgets_units),
    Mutant("forgets what was trained beyond H in a restart", ("I6",), 84, _forgets_what_was_trained_beyond_h),
    Mutant("carries work without its weight", ("I9",), 0, _carried_work_without_weight),
    Mutant("deals units twice", ("I6",), 0, _deals_units_twice),
    Mutant("assigns new units while others lie in the pool", ("I6",), 0, _passes_over_the_pool),
    Mutant("returns no units of the dead", ("I6",), 0, _no_units_returned),
    Mutant("weighs stale work more than the rest", ("I9", REFUSED), 2, _weighs_stale_work_more),
    Mutant("returns no units of rounds that were missed", ("I6",), 0, _forgotten_units_kept),
    Mutant("lets a worker carry units that were dealt again", ("I6", "I9", REFUSED), 146, _carries_whatever_it_says),
    Mutant("deals private units to other workers", ("I6",), 1, _one_pool_for_all),
    Mutant("consumes units outside the transaction", ("I6",), 0, _units_consumed_elsewhere),
    Mutant("trusts its state file after a crash", ("I3", "I4", "I5"), 329, _trusts_its_state_file),
    Mutant("fuses two operations of the outer step", ("I3",), 0, _fused_outer_step),
    Mutant("never tries again after a fault", ("I5",), 87, _never_tries_again),
    Mutant("counts a round that all handed in early as a whole one", ("I8",), 71, _counts_short_rounds_as_whole),
    Mutant("never ends a lease", ("I7",), 5, _leases_never_end),
    Mutant("waits for a hung member", ("I12",), 22, _waits_for_a_hung_member),
    Mutant("takes any weight that a contribution names", ("I9",), 28, _takes_any_weight),
    Mutant("lets one outweigh all others", ("I9",), 24, _outweighed_by_one),
    Mutant("believes every contribution", ("I10",), 15, _believes_every_contribution),
    Mutant("writes a contribution's row before its blob", ("I2",), 0, _writes_the_row_before_the_blob),
    Mutant("signs uploads of any bytes", ("I2", "I6"), 147, _signs_uploads_of_any_bytes),
    Mutant("commits what a worker has uploaded without a checksum", ("I2",), 10, _commits_without_a_checksum),
    Mutant("leaves out whom one evaluator accuses", ("I11",), 61, _leaves_out_whom_one_accuses),
    Mutant("keeps the units of a round that is dropped", ("I6",), 66, _keeps_the_units_of_a_dropped_round),
    Mutant("takes a dropped state for the new one", ("I11",), 251, _takes_the_dropped_state_for_the_new_one),
    Mutant("judges old work by its weight", ("I2",), 740136, _judges_old_work_by_its_weight),
    Mutant("writes whoever leads", ("I2", "I6", "I7"), 36, _writes_whoever_leads),
    Mutant("lets two lead with one token", ("I", REFUSED), 1, _two_lead_with_one_token),
    Mutant("reads the token before its transaction", ("I2", "I4", "I6"), 137, _reads_the_token_before_the_transaction),
    Mutant("reports a delta before it is stored", ("I1", "I2"), 14, _reports_a_delta_before_it_is_stored),
    Mutant("compares leases by the local clock", ("I5",), 1, _leases_by_the_local_clock),
    Mutant("takes tasks without a lease", ("I5",), 126, _tasks_without_a_lease),
    Mutant("leads on after the reply of a commit was lost", ("I",), 106, _leads_on_after_a_lost_reply),
    Mutant(
        "deletes before the checkpoint is complete",
        ("I2", "I4", "unexpected"),
        55,
        _deletes_before_the_checkpoint_is_complete,
    ),
]
