"""Join tokens: what boxes share, and exchange for worker tokens of their own."""

import secrets
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from coordinator.store import sqlite
from coordinator.store.database import Database
from coordinator.store.identity import Actor
from coordinator.store.tokens import Tokens, secret_hash
from harness.coordinator import InThread
from harness.member import Member, spec_toml
from protocol.messages import JOIN_PREFIX, Scope, TokenRequest
from tests.coordinator.crew import crew, info, problem, set_state
from tests.coordinator.test_removing import remove
from tests.support.threads import at_once


def drawn() -> str:
    return f"ost_{secrets.token_urlsafe(32)}"


def exchange(running: InThread, run: str, name: str, join_token: str, secret: str) -> httpx.Response:
    return running.client(join_token).post(f"/v1/runs/{run}/workers/{name}/token", json={"token": secret})


def join(running: InThread, run: str, name: str, token: str) -> httpx.Response:
    with running.client(token) as http:
        return Member(http, run, name).ask_to_join()


def test_a_join_token_is_exchanged_for_a_token_of_one_worker_of_one_run(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    shared.create_run(spec_toml(f"{run}-other"))
    join_token, own = shared.token(Scope.JOIN, note="boxes"), drawn()
    assert join_token.startswith(JOIN_PREFIX)
    made = exchange(shared, run, "w", join_token, own)
    assert made.status_code == 201
    told = made.json()
    assert (told["scope"], told["run"], told["worker"], told["note"]) == ("worker", run, "w", "boxes")
    assert own not in made.text
    problem(join(shared, run, "w", join_token), "forbidden")
    problem(join(shared, run, "v", own), "forbidden")
    problem(join(shared, f"{run}-other", "w", own), "forbidden")
    assert join(shared, run, "w", own).status_code == 200
    assert info(shared, run, "/workers/w")["token"] == told["id"]


def test_the_same_exchange_again_is_the_same_one_and_takes_no_use(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    join_token, own = shared.token(Scope.JOIN, uses=1), drawn()
    first = exchange(shared, run, "w", join_token, own)
    again = exchange(shared, run, "w", join_token, own)
    assert (first.status_code, again.status_code) == (201, 200)
    assert {**first.json(), "last_used_at": None} == {**again.json(), "last_used_at": None}
    used_up = problem(exchange(shared, run, "v", join_token, drawn()), "forbidden")
    assert "exchanged 1 times" in used_up["detail"]
    problem(exchange(shared, run, "v", join_token, own), "invalid-message")  # another worker's


def test_a_name_that_belongs_to_a_token_is_not_exchanged_for_and_takes_no_use(shared: InThread, run: str) -> None:
    crew(shared, run, ["w"])
    join_token = shared.token(Scope.JOIN, uses=1)
    problem(exchange(shared, run, "w", join_token, drawn()), "worker-name-owned")
    assert exchange(shared, run, "v", join_token, drawn()).status_code == 201


@pytest.mark.covers("security:guessed-token")
@pytest.mark.parametrize("weak", ["ost_short", JOIN_PREFIX + "a" * 43, "ost_" + "ä" * 43])
def test_a_secret_that_could_be_guessed_is_refused(shared: InThread, run: str, weak: str) -> None:
    shared.create_run(spec_toml(run))
    problem(exchange(shared, run, "w", shared.token(Scope.JOIN), weak), "invalid-message")


@pytest.mark.covers("security:leaked-join-token")
def test_uses_are_counted_right_however_many_boxes_ask_at_once(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    join_token = shared.token(Scope.JOIN, uses=3)
    replies = at_once(8, lambda number: exchange(shared, run, f"w{number}", join_token, drawn()))
    assert sorted(reply.status_code for reply in replies) == [201] * 3 + [403] * 5


def test_nobody_joins_a_run_that_has_ended(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    set_state(shared, run, "stopped")
    problem(exchange(shared, run, "w", shared.token(Scope.JOIN), drawn()), "run-ended")


def test_what_a_join_token_was_exchanged_for_outlives_it(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    own = drawn()
    with shared.client() as admin:
        made = admin.post("/v1/tokens", json={"scope": "join", "run": run}).json()
        exchange(shared, run, "w", made["token"], own).raise_for_status()
        listed = {token["id"]: token for token in admin.get("/v1/tokens?limit=1000").json()["items"]}
        assert listed[made["id"]]["used"] == 1
        assert [token["worker"] for token in listed.values() if token["parent"] == made["id"]] == ["w"]
        assert admin.delete(f"/v1/tokens/{made['id']}").status_code == 204
    problem(exchange(shared, run, "v", made["token"], drawn()), "unauthorized")
    assert join(shared, run, "w", own).status_code == 200


def test_the_tokens_of_a_removed_run_go_with_it(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    viewer = shared.token(Scope.VIEWER, run=run)
    set_state(shared, run, "stopped")
    remove(shared, run)
    shared.create_run(spec_toml(run))  # another one of this name
    problem(shared.client(viewer).get(f"/v1/runs/{run}"), "unauthorized")


@pytest.mark.covers("security:clock-set")
def test_a_token_that_expired_by_a_wrong_clock_is_good_once_that_is_set_right(tmp_path: Path) -> None:
    """It was forgotten until the next restart."""
    now = [1e9]
    with closing(Database(sqlite.url_in(tmp_path))) as database:
        tokens = Tokens(database, lambda: now[0])
        made = tokens.create(TokenRequest(scope=Scope.VIEWER, expires_in_s=3600), Actor())
        now[0] += 86_400
        assert tokens.find(secret_hash(made.token)) is None
        assert tokens.drop_expired()
        assert not tokens.is_good(made.id)
        assert not tokens.drop_expired(), "once"
        tokens.create(TokenRequest(scope=Scope.VIEWER), Actor())
        assert not tokens.is_good(made.id)
        now[0] -= 86_400
        assert not tokens.drop_expired()
        assert tokens.is_good(made.id)
        assert tokens.find(secret_hash(made.token)) is not None


@pytest.mark.covers("security:clock-set")
def test_last_uses_are_written_after_the_clock_was_set_back(tmp_path: Path) -> None:
    now = [1e9]
    with closing(Database(sqlite.url_in(tmp_path))) as database:
        tokens = Tokens(database, lambda: now[0])
        made = tokens.create(TokenRequest(scope=Scope.VIEWER), Actor())
        now[0] -= 365 * 86400
        identity = tokens.find(secret_hash(made.token))
        assert identity is not None
        tokens.note_use(identity)
        tokens.write_last_uses()
        (again,) = Tokens(database, lambda: now[0]).listed(10, None)
        assert again.last_used_at == now[0]
