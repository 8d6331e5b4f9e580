"""Conversations: work weighs as many tokens as a unit of the set is trained on, on average."""

from datetime import UTC, datetime
from typing import Any

import pytest

from harness.coordinator import InThread
from harness.member import Member, spec_toml
from protocol.messages import DataSummary
from protocol.wire import DeltaHeader, Payload
from tests.coordinator.crew import assigned, events, info, play_round, play_rounds, problem, seeded

CHAT = 'format = "chat"\n'
UNITS = 5  # of a round; a unit has 32 tokens


def summary(unit_tokens: int | None, *, private: bool = False, units: int = 1000) -> DataSummary:
    return DataSummary(digest=None if private else "ab" * 32, units=units, unit_tokens=unit_tokens)


def asked(shared: InThread, run: str, name: str, data: DataSummary | None) -> Any:
    return Member(shared.client(), run, name, data=data).ask_to_join()


def talkers(shared: InThread, run: str, sets: dict[str, DataSummary], data: str = CHAT, **spec: Any) -> list[Member]:
    shared.create_run(spec_toml(run, data=data, min_workers=len(sets), **spec))
    members = [Member(shared.client(), run, name, data=each) for name, each in sets.items()]
    for member in members:
        member.join(shared.admin_token)
    return seeded(members)


@pytest.mark.slow
def test_work_weighs_what_is_trained_on(shared: InThread, run: str) -> None:
    members = talkers(shared, run, {"a": summary(7), "b": summary(7)}, rounds=3)
    play_round(members, 0)
    assert info(shared, run)["tokens"] == 2 * UNITS * 7
    a = members[0]
    assignment, _ = assigned(members, 1)
    values = a.pseudo_gradients(1)[0]
    detail = problem(a.contribute(assignment, 0, values, tokens=UNITS * 32), "invalid-payload")["detail"]
    assert "no multiple of 7 per unit" in detail
    problem(a.contribute(assignment, 0, values, tokens=(UNITS + 1) * 7), "invalid-payload")
    assert a.contribute(assignment, 0, values, tokens=UNITS * 7).status_code == 201


def test_all_workers_agree_on_the_weight_of_a_unit(shared: InThread, run: str) -> None:
    talkers(shared, run, {"a": summary(7)})
    detail = problem(asked(shared, run, "b", summary(30)), "data-mismatch")["detail"]
    assert "unit_tokens=30" in detail
    assert "unit_tokens=7" in detail


@pytest.mark.parametrize(
    ("data", "given", "message"),
    [
        (CHAT, None, "is the number of trained tokens of a unit, 1 to 32"),
        (CHAT, 33, "1 to 32"),
        ("", 7, 'with data.format = "text" it must be null'),
    ],
)
def test_weights_that_cannot_be(shared: InThread, run: str, data: str, given: int | None, message: str) -> None:
    shared.create_run(spec_toml(run, data=data))
    reply = asked(shared, run, "a", summary(given))
    assert message in problem(reply, "data-mismatch")["detail"]


def test_private_conversations_weigh_by_each_worker_s_own_set(shared: InThread, run: str) -> None:
    sets = {"a": summary(20, private=True, units=7), "b": summary(5, private=True, units=100)}
    members = talkers(shared, run, sets, CHAT + "private = true\n", rounds=3)
    a = members[0]
    for round_ in range(2):
        play_round(members, round_)
    reply = a.http.get(f"/v1/runs/{run}/rounds/0/fragments/0/delta")
    header = Payload.from_bytes(reply.raise_for_status().content).header
    assert isinstance(header, DeltaHeader)
    assert {each.worker: each.tokens for each in header.contributors} == {"a": UNITS * 20, "b": UNITS * 5}
    tokens = {each["name"]: each["tokens"] for each in info(shared, run, "/workers")["items"]}
    assert tokens == {"a": 2 * UNITS * 20, "b": 2 * UNITS * 5}
    assert [event["data"] for event in events(shared, run, "epoch-complete")] == [{"worker": "a", "epoch": 0}]
    assert not events(shared, run, "epoch-broken")
    again = summary(20, private=True, units=7).model_copy(update={"unit_tokens": 32})
    a.http.delete(a.path()).raise_for_status()
    detail = problem(asked(shared, run, "a", again), "data-mismatch")["detail"]
    assert "7 units of 32 trained tokens" in detail


@pytest.mark.slow
def test_rolled_back_work_is_subtracted_with_its_weight(shared: InThread, run: str) -> None:
    sets = {"a": summary(20, private=True), "b": summary(5, private=True)}
    members = talkers(shared, run, sets, CHAT + "private = true\n", rounds=4, checkpoints="every_rounds = 1")
    play_rounds(shared, members, range(2))
    client = shared.client()
    client.post(f"/v1/runs/{run}/rollback", json={"to": 1, "from_round": 2}).raise_for_status()
    assert info(shared, run)["tokens"] == UNITS * 25


def test_the_day_of_a_run_is_in_its_spec(shared: InThread, run: str) -> None:
    """Chat templates show it: all workers make the same token set, on whatever day they join."""
    shared.create_run(spec_toml(run, data=CHAT))
    found = info(shared, run)
    assert found["spec"]["data"]["date"] == datetime.fromtimestamp(found["created_at"], UTC).date().isoformat()
    shared.create_run(spec_toml(f"{run}-2", data=CHAT + "date = 2024-02-29\n"))
    assert info(shared, f"{run}-2")["spec"]["data"]["date"] == "2024-02-29"
    shared.create_run(spec_toml(f"{run}-3"))
    assert info(shared, f"{run}-3")["spec"]["data"]["date"] is None
