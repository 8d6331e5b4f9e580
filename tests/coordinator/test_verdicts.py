"""What becomes of contributions that are judged: in the delta, over REST, in the events, in the pool, after a restart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.sync.deltas import rebuild_delta_if_damaged
from harness.coordinator import InThread, coordinator_thread
from harness.member import F32, Member
from harness.stores import read, spoil, the
from protocol.messages import Assignment
from protocol.wire import DeltaHeader, Payload
from tests.coordinator.crew import crew, events, info, ready

pytestmark = pytest.mark.slow

NAMES = ["a", "b", "c", "d"]


def assigned(members: list[Member], round_: int) -> list[Assignment]:
    ready(members, round_)
    return [member.assignment(round_, 30) for member in members]


def contribute(members: list[Member], round_: int, changed: dict[str, Any]) -> list[Assignment]:
    """All contribute to every fragment; of those in `changed`, what it makes of their pseudo-gradients."""
    assignments = assigned(members, round_)
    for member, assignment in zip(members, assignments, strict=True):
        send(member, assignment, changed.get(member.name, times(1)))
    return assignments


def send(member: Member, assignment: Assignment, change: Any, fragments: Sequence[int] = (0, 1)) -> None:
    """Contribute every fragment; of these `fragments`, what `change` makes of it."""
    for p, values in enumerate(honest(member, assignment.round)):
        member.contribute(assignment, p, change(values) if p in fragments else values).raise_for_status()


def honest(member: Member, round_: int) -> list[F32]:
    """Vectors that are alike, as those of workers on the same data are."""
    common = Member(member.http, member.run, "what all have in common")
    common.theta = member.theta
    return [
        (own + shared).astype(np.float32)
        for own, shared in zip(member.pseudo_gradients(round_), common.pseudo_gradients(round_), strict=True)
    ]


def delta(member: Member, round_: int, fragment: int) -> tuple[DeltaHeader, F32]:
    payload = Payload.from_bytes(member.delta(round_, fragment).raise_for_status().content)
    values = np.empty(payload.header.elements, np.float32)
    payload.decode(values)
    assert isinstance(payload.header, DeltaHeader)
    return payload.header, values


def times(factor: float) -> Any:
    return lambda values: (values * np.float32(factor)).astype(np.float32)


@pytest.mark.covers("security:giant-gradient")
@pytest.mark.parametrize(
    ("change", "reason"),
    [(times(1e6), "more than 10 times"), (times(-1), "opposes the others"), (times(0), "less than 0.1 times")],
    ids=["a million times", "flipped", "zeros"],
)
def test_who_is_left_out_is_not_in_the_delta_and_everybody_can_see_why(
    shared: InThread, run: str, change: Any, reason: str
) -> None:
    members = crew(shared, run, NAMES, min_workers=4)
    contribute(members, 0, {"c": change})
    for p in range(len(members[0].theta)):
        header, values = delta(members[0], 0, p)
        assert [(each.worker, each.factor) for each in header.contributors] == [("a", 1.0), ("b", 1.0), ("d", 1.0)]
        expected = np.mean([honest(each, 0)[p] for each in members if each.name != "c"], axis=0)
        np.testing.assert_allclose(values, expected, atol=2e-3)
    shown = info(shared, run, "/rounds/0")["fragments"]
    for fragment in shown:
        assert fragment["contributors"] == NAMES
        assert fragment["verdicts"]["c"]["factor"] == 0
        assert reason in fragment["verdicts"]["c"]["reason"]
        assert [fragment["verdicts"][each]["factor"] for each in "abd"] == [1.0, 1.0, 1.0]
        assert all(fragment["verdicts"][each]["cosine"] > 0.2 for each in "abd")
        norms = [float(np.linalg.norm(honest(each, 0)[fragment["fragment"]])) for each in members]
        assert min(norms) * 0.99 <= fragment["reference"] <= max(norms) * 1.01
    (event,) = events(shared, run, "screened")
    assert event["data"]["worker"] == "c"
    assert reason in event["message"]


def test_the_units_of_a_worker_that_is_left_out_are_trained_by_somebody_else(shared: InThread, run: str) -> None:
    members = crew(shared, run, NAMES, min_workers=4)
    assignments = contribute(members, 0, {"c": times(1e6)})
    for member in members:
        member.step(0)
    its = {unit for start, stop in assignments[2].units for unit in range(start, stop)}
    unit_tokens = members[0].spec.unit_tokens
    assert info(shared, run)["tokens"] == 3 * len(its) * unit_tokens
    assert info(shared, run, "/workers/c")["tokens"] == 0
    again = assigned(members, 1)
    dealt = {unit for each in again for start, stop in each.units for unit in range(start, stop)}
    assert its <= dealt


def test_who_is_left_out_of_some_fragments_only_has_used_its_units(shared: InThread, run: str) -> None:
    members = crew(shared, run, NAMES, min_workers=4)
    for member, assignment in zip(members, assigned(members, 0), strict=True):
        send(member, assignment, times(1e6 if member.name == "c" else 1), [0])
    assert [each.worker for each in delta(members[0], 0, 0)[0].contributors] == ["a", "b", "d"]
    assert [each.worker for each in delta(members[0], 0, 1)[0].contributors] == NAMES
    for member in members:
        member.step(0)
    assert info(shared, run, "/workers/c")["tokens"] > 0


def test_with_the_plain_mean_nobody_is_left_out_but_told_of(shared: InThread, run: str) -> None:
    members = crew(shared, run, NAMES, min_workers=4, sync='aggregation = "mean"')
    contribute(members, 0, {"c": times(100)})
    header, _ = delta(members[0], 0, 0)
    assert [each.factor for each in header.contributors] == [1.0] * 4
    verdict = info(shared, run, "/rounds/0")["fragments"][0]["verdicts"]["c"]
    assert (verdict["factor"], verdict["reason"]) == (1.0, "")
    assert verdict["ratio"] > 50
    assert not events(shared, run, "screened")


def test_a_short_first_round_says_nothing_about_the_norms_of_whole_ones(shared: InThread, run: str) -> None:
    """Those of two boxes were shortened for four rounds, or left out: a tenth of the steps had been trained before."""
    members = crew(shared, run, ["a", "b"], rounds=4, inner_steps=40, min_workers=2, sync='wait = "never"')
    for round_, length in enumerate([1, 40, 1e6]):
        contribute(members, round_, {name: times(length) for name in "ab"})
        header, _ = delta(members[0], round_, 0)
        assert [each.factor < 1 for each in header.contributors] == [round_ == 2] * 2
        for member in members:
            member.step(round_)


def test_after_a_restart_the_same_is_left_out_and_a_spoilt_delta_is_made_again(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        members = crew(running, "r", NAMES, min_workers=4)
        assignments = assigned(members, 0)
        for member, assignment in zip(members[:3], assignments, strict=False):
            send(member, assignment, times(1e6 if member.name == "c" else 1))
        tokens = [member.http.headers["authorization"] for member in members]
    with coordinator_thread(tmp_path / "data") as running:  # what was found in the three has gone with the process
        for member, token in zip(members, tokens, strict=True):
            member.http = running.client()
            member.http.headers["Authorization"] = token
        send(members[3], assignments[3], times(1))
        before = members[0].delta(0, 0).raise_for_status().content
        header, _ = delta(members[0], 0, 0)
        assert [each.worker for each in header.contributors] == ["a", "b", "d"]
        run = running.live("r")
        spoil(run.blobs, the(run, "deltas", 0, 0))
        assert rebuild_delta_if_damaged(run, 0, 0)
        assert read(run.blobs, the(run, "deltas", 0, 0)) == before


def test_without_room_in_memory_contributions_are_looked_at_again_when_they_are_judged(
    shared: InThread, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = crew(shared, run, NAMES, min_workers=4)
    monkeypatch.setattr(shared.live(run).context.memory, "take", lambda size: None)
    contribute(members, 0, {"c": times(-1)})
    header, _ = delta(members[0], 0, 0)
    assert [each.worker for each in header.contributors] == ["a", "b", "d"]
