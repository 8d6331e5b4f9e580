"""What a state would be without one contribution, for the evaluators that measure that (`trust/leaving_out.py`)."""

from coordinator.aggregation.fragment import ContributionsLost, make_difference
from coordinator.run.live_run import LiveRun
from coordinator.store.tables import EvaluationRow, FragmentRow
from coordinator.sync.deltas import collected_again
from coordinator.trust import leaving_out
from protocol.digest import digest
from protocol.errors import Problem


def difference(run: LiveRun, state: int, fragment: int, worker: str, evaluator: str) -> tuple[bytes, memoryview]:
    """Return the digest and the bytes of D, the difference to a fragment's delta if `worker` is left out of the round
    before `state`: the mean without it, minus the mean of all. The state to evaluate is then x − η·D.

    Raises Problem: not-asked, unless `evaluator` has evaluated the state and `worker` may be left out; gone, if its
    contributions are not kept.
    """
    with run.context.database.read() as session:
        current = state == run.round and evaluator not in run.members.stale
        evaluates = current and session.get(EvaluationRow, (run.id, state, evaluator)) is not None
        if not evaluates or worker not in (leaving_out.contributors(run, session, state) or ()):
            raise Problem("not-asked", f"{evaluator} was not asked to measure state {state} without {worker}")
        row = session.get_one(FragmentRow, (run.id, state - 1, fragment))
    assert row.delta_digest is not None, "a state follows from published deltas"
    key = digest(row.delta_digest + f"without/{worker}".encode())
    content = run.context.memory.delta(key)
    if content is None:
        with run.context.working:
            try:
                found = collected_again(run, row)
                content = None if found is None else make_difference(found[0], run.blobs, found[1], worker)
            except (ContributionsLost, FileNotFoundError):
                content = None
        if content is None:
            raise Problem("gone", f"the contributions to round {row.round} are not kept any more")
        run.context.memory.add_delta(key, content)
    return digest(content), content
