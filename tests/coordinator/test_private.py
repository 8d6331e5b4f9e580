"""Private data: every worker trains on a set of its own, of which the coordinator knows the length alone."""

import math
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from coordinator.store.tables import RunRow
from harness.coordinator import InThread
from harness.member import Member, spec_toml
from protocol.messages import DataSummary
from protocol.spec.run import PRIVATE_WORKERS, UNITS_PER_WORKER
from tests.coordinator.crew import events, info, play_round, play_rounds, problem, ready, recovered, set_state
from tests.support.waiting import wait_until

B = UNITS_PER_WORKER  # the first unit of the second worker


def summary(units: int | None) -> DataSummary | None:
    return None if units is None else DataSummary(units=units)


def asked(running: InThread, run: str, name: str, data: DataSummary | None) -> httpx.Response:
    """The answer to a worker that asks to join with its training set."""
    return Member(running.client(), run, name, data=data).ask_to_join()


def bring(running: InThread, run: str, name: str, units: int | None) -> Member:
    """A new member with a training set of `units`; None: it does not say."""
    member = Member(running.client(), run, name, data=summary(units))
    member.join(running.admin_token)
    return recovered(member)


def private_crew(running: InThread, run: str, sets: dict[str, int | None], **spec: Any) -> list[Member]:
    running.create_run(spec_toml(run, data="private = true", **spec))
    members = [bring(running, run, name, units) for name, units in sets.items()]
    assert members[0].assignment(None).action == "seed"
    members[0].seed()
    return members


@pytest.mark.slow
@pytest.mark.covers("reliability:units-once")
def test_every_worker_is_dealt_units_of_its_own_set(shared: InThread, run: str) -> None:
    members = private_crew(shared, run, {"a": 12, "b": 7}, rounds=3, min_workers=2)
    for round_ in range(3):
        ready(members, round_)
        assert [member.assignment(round_).units for member in members] == [
            [[5 * round_, 5 * round_ + 5]],
            [[B + 5 * round_, B + 5 * round_ + 5]],
        ]
        play_round(members, round_)
    shown = info(shared, run, "/units")["items"]
    assert [(each["worker"], each["epoch"], each["units"], each["consumed"]) for each in shown] == [
        ("b", 2, 7, 1),
        ("b", 1, 7, 7),
        ("b", 0, 7, 7),
        ("a", 1, 12, 3),
        ("a", 0, 12, 12),
    ]
    paged, after = [], ""
    while after is not None:
        page = info(shared, run, f"/units?limit=2{after and '&after='}{after}")
        paged += page["items"]
        after = page["next"]
    assert paged == shown
    told = [(event["data"], event["message"].split(":")[0]) for event in events(shared, run, "epoch-complete")]
    assert told == [
        ({"worker": "b", "epoch": 0}, "epoch 0 of b's own data is complete"),
        ({"worker": "a", "epoch": 0}, "epoch 0 of a's own data is complete"),
        ({"worker": "b", "epoch": 1}, "epoch 1 of b's own data is complete"),
    ]
    assert events(shared, run, "epoch-broken") == []


def test_a_worker_too_many_is_refused(shared: InThread, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its units' numbers do not fit into 63 bits: the database could not store them, and it was an internal fault."""
    assert PRIVATE_WORKERS * UNITS_PER_WORKER == 1 << 63
    monkeypatch.setattr("coordinator.rounds.membership.PRIVATE_WORKERS", 2)
    members = private_crew(shared, run, {"a": 12, "b": 7}, rounds=3, min_workers=2)
    with pytest.raises(httpx.HTTPStatusError) as refused:
        bring(shared, run, "c", 7)
    assert "2 workers with private data have joined" in problem(refused.value.response, "run-full")["detail"]
    play_round(members, 0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["left", "evicted", "banned"])
def test_units_that_come_back_are_dealt_to_nobody_but_their_worker(shared: InThread, run: str, how: str) -> None:
    a, b = private_crew(shared, run, {"a": 100, "b": 100}, rounds=3)
    ready([a, b], 0)
    if how == "left":
        a.http.delete(a.path()).raise_for_status()
    else:
        set_state(shared, f"{run}/workers/a", how)
    for round_ in range(2):
        assert b.take_part(round_).units == [[B + 5 * round_, B + 5 * round_ + 5]]
        b.step(round_)
    of_a = info(shared, run, "/units")["items"][1]
    assert (of_a["worker"], of_a["free"]) == ("a", 100)
    if how == "banned":
        set_state(shared, f"{run}/workers/a", "readmitted")
    again = bring(shared, run, "a", 100)
    again.theta, again.momentum = b.theta, b.momentum
    assert again.assignment(2).units == [[0, 5]], "those that it had before"


def test_a_worker_cannot_take_the_units_of_another_as_work_that_it_carries(shared: InThread, run: str) -> None:
    a, b = private_crew(shared, run, {"a": 100, "b": 100}, rounds=3)
    ready([a, b], 0)
    a.http.delete(a.path()).raise_for_status()
    b.take_part(0)
    b.step(0)
    refused = b.http.put(b.path("/assignment"), json={"state_round": 1, "carried": [[0, 5]]})
    assert "but was assigned only 0 since" in problem(refused, "units-not-held")["detail"]


@pytest.mark.parametrize("first", ["tells it", "tells nothing"])
def test_private_sets_are_of_one_tokenizer(shared: InThread, run: str, first: str) -> None:
    """The same ids must mean the same text, whatever the text is. A script that told nothing came first: then no
    tokenizers were compared at all."""
    shared.create_run(spec_toml(run, data="private = true", rounds=3))
    if first == "tells nothing":
        bring(shared, run, "first", None)
    told = DataSummary(tokenizer="words", tokenizer_digest="ab" * 32, units=12)
    assert asked(shared, run, "a", told).status_code == 200
    assert asked(shared, run, "b", told.model_copy(update={"units": 5})).status_code == 200
    other = asked(shared, run, "c", told.model_copy(update={"tokenizer_digest": "cd" * 32}))
    assert "made by the tokenizer words (BLAKE3 cdcd" in problem(other, "data-mismatch")["detail"]
    in_bytes = asked(shared, run, "d", summary(12))
    assert "made by the tokenizer bytes" in problem(in_bytes, "data-mismatch")["detail"]


@pytest.mark.covers("security:training-data-leak")
def test_nothing_but_the_length_of_a_set_is_told(shared: InThread, run: str) -> None:
    """A digest would tell whether a worker has a text that somebody else knows."""
    private_crew(shared, run, {"a": 12, "b": None}, rounds=3)
    with shared.coordinator.database.read() as session:
        assert session.scalars(select(RunRow.data).where(RunRow.name == run)).one() == {"units": 12}
    refused = asked(shared, run, "c", DataSummary(digest="ab" * 32, units=12))
    assert "with data.private = true" in problem(refused, "data-mismatch")["detail"]
    shared.create_run(spec_toml(f"{run}-shared"))
    refused = asked(shared, f"{run}-shared", "c", summary(12))
    assert "with data.private = false" in problem(refused, "data-mismatch")["detail"], "there it is needed"
    assert {worker["name"] for worker in info(shared, run, "/workers")["items"]} == {"a", "b"}


@pytest.mark.parametrize("units", [13, None])
def test_a_worker_that_comes_back_with_another_set_is_refused(shared: InThread, run: str, units: int | None) -> None:
    """Its units would stand for other rows: some would be trained on twice, others never."""
    (a,) = private_crew(shared, run, {"a": 12}, rounds=3)
    a.http.delete(a.path()).raise_for_status()
    detail = problem(asked(shared, run, "a", summary(units)), "data-mismatch")["detail"]
    assert "had 12 units" in detail
    bring(shared, run, "a", 12)


@pytest.mark.slow
def test_the_held_out_loss_is_the_mean_of_what_the_workers_measure(shared: InThread, run: str) -> None:
    """Each holds out a part of its own set, so that one of them cannot speak for the others."""
    members = private_crew(shared, run, {"a": 12, "b": 12}, rounds=2, min_workers=2, checkpoints="every_rounds = 1")
    ready(members, 0)
    assert all(member.assignment(0).evaluate for member in members)
    for member, report in zip(members, ({"loss": 2.0, "tokens": 300}, {"loss": 3.0, "tokens": 100}), strict=True):
        member.http.put(f"/v1/runs/{run}/rounds/0/evaluation", json=report).raise_for_status()
    assert info(shared, run)["held_out_loss"] == info(shared, run, "/rounds/0")["held_out_loss"] == 2.25
    assert info(shared, run)["held_out_bits_per_byte"] is None, "nobody said how many bytes these tokens stand for"
    assert [event["data"] for event in events(shared, run, "evaluated")] == [{"round": 0, "worker": "a"}], "told once"
    by_worker = info(shared, run, "/rounds/0")["evaluations"]
    assert {worker: each["loss"] for worker, each in by_worker.items()} == {"a": 2.0, "b": 3.0}
    play_rounds(shared, members, range(2))
    assert all(member.assignment(2).evaluate for member in members), "the last state as well"
    members[1].http.put(f"/v1/runs/{run}/rounds/2/evaluation", json={"loss": 1.5, "tokens": 1}).raise_for_status()
    assert [member.assignment(2).evaluate for member in members] == [True, False]
    assert info(shared, run)["held_out_loss"] == 1.5


@pytest.mark.slow
def test_the_mean_outlives_what_it_was_made_of(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run, rounds=4, data="private = true", checkpoints="every_rounds = 1\nkeep = 1\n[retention]\nrounds = 1"))  # fmt: skip
    members = [bring(shared, run, name, 12) for name in "ab"]
    members[0].assignment(None)
    members[0].seed()
    for member, loss in zip(members, (2.0, 3.0), strict=True):
        member.assignment(0)
        report = {"loss": loss, "tokens": 100, "bytes": 500}
        member.http.put(f"/v1/runs/{run}/rounds/0/evaluation", json=report).raise_for_status()
    play_rounds(shared, members, range(4))
    wait_until(lambda: info(shared, run, "/rounds/0")["evaluations"] == {})
    old = info(shared, run, "/rounds/0")
    assert old["held_out_loss"] == 2.5
    assert old["held_out_bits_per_byte"] == pytest.approx(2.5 / math.log(2) / 5)
