"""A join whose answer was lost is sent again: it must be the same join, not a second process under a taken name."""

import pytest

from harness.coordinator import InThread
from harness.member import DATA, TENSORS, Member, spec_toml
from protocol.messages import JoinRequest
from tests.coordinator.crew import enlist, events, problem
from tests.support.threads import at_once

TOKEN = "ost_" + "a" * 43
MINUTE = "lease_s = 60"


@pytest.mark.covers("reliability:lost-requests")
def test_a_repeated_join_answers_as_the_first_one_did(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run, members=MINUTE))
    worker = Member(shared.client(), run, "w")
    first = worker.ask_to_join(member_token=TOKEN).raise_for_status()
    again = worker.ask_to_join(member_token=TOKEN).raise_for_status()
    assert again.json() == first.json()
    assert first.json()["member_token"] == TOKEN
    worker.http.headers["Authorization"] = f"Bearer {TOKEN}"
    assert worker.http.put(worker.path("/lease"), json={}).status_code == 200
    assert len(events(shared, run, "joined")) == 1


def test_another_token_does_not_take_the_name_over(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run, members=MINUTE))
    enlist(shared, run, "w")
    thief = Member(shared.client(), run, "w")
    problem(thief.ask_to_join(member_token=TOKEN), "worker-name-taken")


@pytest.mark.covers("security:guessed-token")
@pytest.mark.parametrize("weak", ["ost_short", "a" * 47, "ost_" + "ä" * 43])
def test_a_token_that_could_be_guessed_is_refused(shared: InThread, run: str, weak: str) -> None:
    shared.create_run(spec_toml(run))
    worker = Member(shared.client(), run, "w")
    body = JoinRequest(tensors=TENSORS, data=DATA).model_dump(mode="json") | {"member_token": weak}
    assert worker.http.put(worker.path(), json=body).status_code == 422


@pytest.mark.covers("security:shared-member-token")
def test_a_token_of_another_worker_is_refused_in_this_run_and_in_others(shared: InThread, run: str) -> None:
    for name in (run, f"{run}-other"):
        shared.create_run(spec_toml(name, members=MINUTE))
    token = "ost_" + "b" * 43
    Member(shared.client(), run, "w").ask_to_join(member_token=token).raise_for_status()
    for name in (run, f"{run}-other"):
        refused = Member(shared.client(), name, "v").ask_to_join(member_token=token)
        assert "member_token: another worker has it" in problem(refused, "invalid-message")["detail"]


def test_workers_of_many_runs_that_propose_one_token_at_once(shared: InThread, run: str) -> None:
    """A constraint of the database decides, not a look at it beforehand: the others get a problem and not a 500."""
    runs = [f"{run}-{n}" for n in range(6)]
    for name in runs:
        shared.create_run(spec_toml(name, members=MINUTE))
    token = "ost_" + run[-1] * 43
    members = [Member(shared.client(), name, "w") for name in runs]
    answers = at_once(len(members), lambda number: members[number].ask_to_join(member_token=token))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(refused) == len(runs) - 1
    for answer in refused:
        problem(answer, "invalid-message")
