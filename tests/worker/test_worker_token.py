"""A worker with a join token: it exchanges it once, keeps its own, and goes by that."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from harness.coordinator import InThread
from harness.member import spec_toml
from outerstep.common.exit_codes import Exit
from protocol.errors import Problem
from protocol.messages import ExchangeRequest, Scope, TokenInfo
from tests.support.text import write_chapters
from tests.support.workers import worker_settings
from tests.worker.test_agent import RUN
from worker.agent import run_worker
from worker.errors import BoxError, StateDirBusy
from worker.link.client import Client, open_http
from worker.link.worker_token import token_to_read_with, with_worker_token
from worker.ranks import ALONE
from worker.state.state_dir import WORKER_TOKEN, StateDir


@pytest.fixture
def client(coordinator: InThread) -> Iterator[Client]:
    """A client with a join token for the run `r`."""
    coordinator.create_run(spec_toml("r"))
    with open_http(coordinator.url) as http:
        yield Client(http, "r", coordinator.token(Scope.JOIN))


def used(running: InThread) -> int:
    """How often join tokens were exchanged."""
    with running.client() as admin:
        return sum(token["used"] for token in admin.get("/v1/tokens").json()["items"])


@pytest.mark.slow
def test_a_worker_exchanges_a_join_token_by_itself_and_once(
    coordinator: InThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    coordinator.create_run(RUN.format(source=write_chapters(tmp_path / "text"), rounds=1))
    state = tmp_path / "state"
    with coordinator.client() as admin:
        made = admin.post("/v1/tokens", json={"scope": "join", "uses": 1}).json()
    settings = worker_settings(coordinator, "text", state, token=made["token"])
    assert run_worker(settings) == Exit.DONE
    own = json.loads((state / WORKER_TOKEN).read_text())
    assert (own["run"], own["worker"], own["exchanged"]) == ("text", "a", True)
    assert (state / WORKER_TOKEN).stat().st_mode & 0o777 == 0o600
    assert state.stat().st_mode & 0o777 == 0o700
    assert "exchanged the join token" in caplog.text
    assert own["token"] not in caplog.text
    with coordinator.client() as admin:
        (held,) = [token for token in admin.get("/v1/tokens").json()["items"] if token["parent"] == made["id"]]
        (worker,) = admin.get("/v1/runs/text/workers").json()["items"]
        assert worker["token"] == held["id"]
        admin.delete(f"/v1/tokens/{made['id']}").raise_for_status()
    assert run_worker(settings) == Exit.DONE, "its own token is as good as before"


class Killed(Exception):
    pass


def test_an_exchange_whose_answer_was_lost_is_asked_for_again(coordinator: InThread, tmp_path: Path) -> None:
    coordinator.create_run(spec_toml("r"))
    lost: list[httpx.Response] = []

    def lose(answer: httpx.Response) -> None:
        if answer.request.method == "POST" and not lost:
            lost.append(answer)
            raise httpx.ReadError("the line is gone", request=answer.request)

    with httpx.Client(base_url=coordinator.url, event_hooks={"response": [lose]}) as http:
        client = Client(http, "r", coordinator.token(Scope.JOIN, uses=1), sleep=lambda _: None)
        with_worker_token(client, "w", tmp_path / "state", ALONE).run_detail()
    assert len(lost) == 1
    assert used(coordinator) == 1


def test_who_is_killed_before_the_answer_exchanges_for_the_same_token(
    coordinator: InThread, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = Client.exchange_token

    def dies(client: Client, worker: str, request: ExchangeRequest) -> TokenInfo:
        exchange(client, worker, request)
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Client, "exchange_token", dies)
        with pytest.raises(Killed):
            with_worker_token(client, "w", tmp_path / "state", ALONE)
    before = json.loads((tmp_path / "state" / WORKER_TOKEN).read_text())
    assert before["exchanged"] is False
    with_worker_token(client, "w", tmp_path / "state", ALONE).run_detail()
    assert json.loads((tmp_path / "state" / WORKER_TOKEN).read_text()) == before | {"exchanged": True}
    assert used(coordinator) == 1


def test_a_token_that_was_revoked_is_not_exchanged_anew(coordinator: InThread, client: Client, tmp_path: Path) -> None:
    with_worker_token(client, "w", tmp_path / "state", ALONE)
    with coordinator.client() as admin:
        (own,) = [token for token in admin.get("/v1/tokens").json()["items"] if token["parent"]]
        admin.delete(f"/v1/tokens/{own['id']}").raise_for_status()
    with pytest.raises(Problem, match="delete the file") as refused:
        with_worker_token(client, "w", tmp_path / "state", ALONE)
    assert refused.value.slug == "unauthorized"
    assert str(tmp_path / "state" / WORKER_TOKEN) in refused.value.detail
    assert used(coordinator) == 1
    (tmp_path / "state" / WORKER_TOKEN).unlink()
    with_worker_token(client, "w", tmp_path / "state", ALONE).run_detail()


def test_another_worker_or_run_in_the_same_directory_has_a_token_of_its_own(
    coordinator: InThread, client: Client, tmp_path: Path
) -> None:
    with_worker_token(client, "w", tmp_path / "state", ALONE)
    with_worker_token(client, "v", tmp_path / "state", ALONE)
    assert used(coordinator) == 2


def test_what_is_no_join_token_is_used_as_it_is(tmp_path: Path) -> None:
    with open_http("http://127.0.0.1:1") as http:
        client = Client(http, "r", "ost_token")
        assert with_worker_token(client, "w", None, ALONE) is client
    assert not list(tmp_path.iterdir())


def test_where_a_token_cannot_be_kept_none_is_exchanged(coordinator: InThread, client: Client, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / WORKER_TOKEN).write_text('{"token": ')
    for directory, said in (
        (None, "give a state_dir, or a worker token"),
        (tmp_path / "file" / "state", "give another --state-dir"),
        (tmp_path / "damaged", "is damaged"),
    ):
        with pytest.raises(BoxError, match=said):
            with_worker_token(client, "w", directory, ALONE)
    with StateDir(tmp_path / "busy"), pytest.raises(StateDirBusy):
        with_worker_token(client, "w", tmp_path / "busy", ALONE)
    assert used(coordinator) == 0


def test_what_only_reads_uses_the_own_token_where_there_is_one(coordinator: InThread, tmp_path: Path) -> None:
    coordinator.create_run(spec_toml("r"))
    join_token = coordinator.token(Scope.JOIN)
    read_with = lambda: token_to_read_with(join_token, "r", "w", tmp_path / "state")  # noqa: E731
    assert read_with() == join_token
    with open_http(coordinator.url) as http:
        with_worker_token(Client(http, "r", join_token), "w", tmp_path / "state", ALONE)
    assert read_with() == json.loads((tmp_path / "state" / WORKER_TOKEN).read_text())["token"]
    assert token_to_read_with("ost_token", "r", "w", tmp_path / "state") == "ost_token"
