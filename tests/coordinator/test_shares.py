"""What the holder of one token may take of a server: the rest is refused, told when to ask again, and others are served."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.api.metrics.server import ServerMetrics
from coordinator.quotas import ALL_TOKENS, BURST_S, SWEEP_AT, Quotas, RateLimiter
from coordinator.run.live_run import LiveRun
from coordinator.settings import Settings
from coordinator.store.partial_uploads import BYTES_PER_OWNER, RETRY_S, PartialUploads
from coordinator.store.tokens import new_secret
from harness.coordinator import InThread, SettableClock, coordinator_thread
from harness.member import Member, spec_toml
from protocol.errors import Problem
from protocol.messages import Scope
from tests.coordinator.crew import crew, play_round, problem
from tests.support.waiting import wait_until

REQUESTS = 100  # that may come at once, of one token


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory, clock: SettableClock) -> Iterator[InThread]:
    """A coordinator with small shares."""
    data = tmp_path_factory.mktemp("strict") / "data"
    with coordinator_thread(
        data, clock=clock, requests_per_s=REQUESTS / 5, streams_per_token=2, polls_per_token=2
    ) as running:
        yield running


@contextmanager
def viewer(running: InThread) -> Iterator[httpx.Client]:
    """Somebody with a token of his own."""
    with running.client(running.token(Scope.VIEWER)) as client:
        yield client


def test_who_asks_too_often_is_told_when_to_ask_again(strict: InThread, clock: SettableClock) -> None:
    with viewer(strict) as client, viewer(strict) as another, strict.client() as admin:
        assert [client.get("/v1/runs?limit=1").status_code for _ in range(90)] == [200] * 90
        refused = client.get("/v1/runs?limit=1")
        assert "20 requests per second" in problem(refused, "too-many-requests")["detail"]
        assert refused.headers["Retry-After"] == "1"
        assert another.get("/v1/runs").status_code == 200
        assert [admin.get("/v1/runs?limit=1000").status_code for _ in range(10)] == [200] * 10
        clock.advance(int(refused.headers["Retry-After"]))
        assert client.get("/v1/runs?limit=1").status_code == 200


@pytest.mark.slow
@pytest.mark.covers("security:listing-flood")
def test_a_long_listing_counts_as_many(strict: InThread, clock: SettableClock) -> None:
    with viewer(strict) as client:
        assert client.get("/v1/runs?limit=1000").status_code == 200
        assert problem(client.get("/v1/runs?limit=1"), "too-many-requests")
        clock.advance(5)
        assert client.get("/v1/runs?limit=1").status_code == 200


@pytest.mark.slow
@pytest.mark.covers("security:listing-flood")
def test_members_train_while_a_viewer_is_refused(strict: InThread, run: str) -> None:
    (member,) = crew(strict, run, ["a"], rounds=1)
    with viewer(strict) as client:
        while client.get(f"/v1/runs/{run}/rounds?limit=1000").status_code == 200:
            pass
        play_round([member], 0)
    strict.await_state(run, 1)


@pytest.mark.covers("security:stream-flood")
def test_streams_of_one_token_are_counted_while_they_last(strict: InThread, run: str, clock: SettableClock) -> None:
    strict.create_run(spec_toml(run))
    stream: dict[str, Any] = {"url": f"/v1/runs/{run}/events", "headers": {"Accept": "text/event-stream"}}
    with viewer(strict) as client, viewer(strict) as another:
        with ExitStack() as held:
            answers = [held.enter_context(each.stream("GET", **stream)) for each in (client, client, another)]
            lines = [answer.iter_lines() for answer in answers]  # which close their streams when nobody has them
            assert all(next(each).startswith("id: ") for each in lines)
            refused = client.get(**stream)
            assert "2 streams" in problem(refused, "too-many-requests")["detail"]
            assert client.get(f"/v1/runs/{run}/events").status_code == 200

        def is_taken() -> bool:
            clock.advance(1)
            with client.stream("GET", **stream) as answer:
                return answer.status_code == 200

        wait_until(is_taken)


@contextmanager
def exchanged(running: InThread, run: str, count: int) -> Iterator[list[httpx.Client]]:
    """As many clients as asked for, whose worker tokens were exchanged for one join token."""
    join = running.token(Scope.JOIN, run=run, uses=count)
    with ExitStack() as held:
        clients = []
        for number in range(count):
            secret = new_secret()[0]
            with running.client(join) as client:
                client.post(f"/v1/runs/{run}/workers/w{number}/token", json={"token": secret}).raise_for_status()
            clients.append(held.enter_context(running.client(secret)))
        yield clients


@pytest.mark.slow
@pytest.mark.covers("security:metrics-flood", "security:stream-flood")
def test_tokens_exchanged_for_one_join_token_share_requests_streams_and_line_checks(
    strict: InThread, run: str, clock: SettableClock
) -> None:
    strict.create_run(spec_toml(run))
    clock.advance(60)
    with exchanged(strict, run, 3) as (a, b, c), viewer(strict) as another, ExitStack() as held:
        for each in (a, b):
            held.enter_context(each.stream("GET", f"/v1/runs/{run}/events", headers={"Accept": "text/event-stream"}))
        refused = c.get(f"/v1/runs/{run}/events", headers={"Accept": "text/event-stream"})
        detail = problem(refused, "too-many-requests")["detail"]
        assert "2 streams" in detail
        assert "same join token" in detail, "c itself has none"
        (join,) = [each.id for each in strict.coordinator.tokens.listed(1000, None, run) if each.scope is Scope.JOIN]
        with strict.coordinator.quotas.line_check(join):
            problem(a.get("/v1/line-check?bytes=1"), "too-many-requests")
            problem(b.post("/v1/line-check", content=b"x"), "too-many-requests")
            assert a.get("/v1/line-check?bytes=0").status_code == 200, "which measures nothing"
        assert a.get("/v1/line-check?bytes=1").status_code == 200
        clock.advance(60)
        assert a.get("/v1/runs?limit=1000").status_code == 200
        problem(b.get("/v1/runs?limit=1"), "too-many-requests")
        assert another.get("/v1/runs?limit=1").status_code == 200


def test_a_members_reading_counts_with_its_token_and_its_training_does_not(
    strict: InThread, run: str, clock: SettableClock
) -> None:
    clock.advance(60)
    token = strict.token(Scope.WORKER, names=2)
    (a,) = crew(strict, run, ["a"], rounds=1)
    b = Member(strict.client(), run, "b")
    b.join(token)
    with strict.client(token) as client:
        assert client.get("/v1/runs?limit=1000").status_code == 200
    problem(b.http.get("/v1/runs?limit=1"), "too-many-requests")
    assert b.http.put(b.path("/lease"), json={}).status_code == 200
    a.http.close()
    b.http.close()


@pytest.mark.slow
@pytest.mark.covers("security:long-poll-flood")
def test_long_polls_of_one_token_are_bounded_and_members_are_woken_first(strict: InThread, run: str) -> None:
    (a,) = crew(strict, run, ["a"], rounds=2)
    delta, callers = f"/v1/runs/{run}/rounds/0/fragments/0/delta", strict.coordinator.quotas
    with viewer(strict) as client, ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(client.get, delta, headers={"Prefer": "wait=30"}) for _ in range(2)]
        wait_until(lambda: callers.polls == 2)
        refused = client.get(delta, headers={"Prefer": "wait=30"})
        assert "2 long polls" in problem(refused, "too-many-requests")["detail"]
        problem(client.get(delta), "not-published")  # which does not wait
        play_round([a], 0)
        assert [each.result().status_code for each in waiting] == [200, 200]
    wait_until(lambda: callers.polls == 0)


@pytest.mark.covers("security:metrics-flood")
def test_metrics_are_made_once_a_second_for_all_but_an_admin(
    strict: InThread, clock: SettableClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.advance(60)
    made: list[object] = []
    exposition = ServerMetrics.exposition

    def counted(meter: ServerMetrics, run: LiveRun | None) -> bytes:
        made.append(run)
        return exposition(meter, run)

    monkeypatch.setattr(ServerMetrics, "exposition", counted)
    with viewer(strict) as client, viewer(strict) as another, strict.client() as admin:
        texts = {each.get("/metrics").text for each in (client, another, client)}
        assert (len(texts), len(made)) == (1, 1)
        clock.advance(1.1)
        client.get("/metrics")
        assert len(made) == 2
        admin.get("/metrics")
        assert len(made) == 3


@pytest.mark.covers("security:unfinished-payloads")
def test_payloads_of_which_parts_are_missing_are_bounded_by_owner() -> None:
    partial_uploads = PartialUploads(SettableClock(), bytes_per_owner=100)

    def get(owner: str, which: str, size: int) -> None:
        partial_uploads.get((owner, which), size, bytes(32), lambda: memoryview(bytearray(size)))

    get("a", "first", 1000)  # one may always be there, however large
    with pytest.raises(Problem, match="uploads of 1000 bytes") as caught:
        get("a", "second", 1)
    assert caught.value.retry_after_s == RETRY_S
    get("a", "first", 1000)
    get("b", "first", 60)
    get("b", "second", 40)
    with pytest.raises(Problem, match="too-many-requests"):
        get("b", "third", 1)
    with pytest.raises(Problem, match="too-many-requests"):
        partial_uploads.get(("b", "second"), 39, bytes(32), lambda: memoryview(bytearray(39)), most_bytes=98)
    assert partial_uploads.waiting == 3
    assert BYTES_PER_OWNER == 4 << 30


def test_the_bound_on_parts_is_the_setting(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data", parts_bytes_per_member=1) as running:
        get = running.coordinator.partial_uploads.get
        get(("a", "1"), 1, bytes(32), lambda: memoryview(bytearray(1)))
        with pytest.raises(Problem, match="too-many-requests"):
            get(("a", "2"), 1, bytes(32), lambda: memoryview(bytearray(1)))


# --- rates and bytes, without HTTP ------------------------------------------------------------------------------------

A, B = b"a", b"b"


def refused(rates: RateLimiter, caller: bytes, cost: float = 1.0) -> float:
    """Return the seconds until a retry."""
    with pytest.raises(Problem, match="too-many-requests") as caught:
        rates.take(caller, cost)
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


def test_so_many_at_once_and_then_as_many_as_time_allows() -> None:
    clock = SettableClock()
    rates = RateLimiter(10, clock)
    at_once = int(10 * BURST_S)
    for passed_s, allowed, then_s in ((0, at_once, 0.1), (0.35, 3, 0.05), (1000, at_once, 0.1)):
        clock.advance(passed_s)
        for _ in range(allowed):
            rates.take(A)
        assert refused(rates, A) == pytest.approx(then_s)
        rates.take(B)  # another's are not touched
    for _ in range(100):
        clock.advance(refused(rates, A) + 1e-9)
        rates.take(A)  # who obeys is served


def test_what_costs_more_than_is_left_is_served_once_and_waited_for_afterwards() -> None:
    clock = SettableClock()
    rates = RateLimiter(10, clock)
    rates.take(A, 200)
    assert refused(rates, A) == pytest.approx(20 - BURST_S + 0.1)
    clock.advance(20 - BURST_S + 0.101)
    rates.take(A)


def test_those_with_nothing_to_remember_of_are_forgotten() -> None:
    clock = SettableClock()
    rates = RateLimiter(1000, clock)
    for number in range(10 * SWEEP_AT):
        rates.take(number.to_bytes(4, "big"))
        clock.advance(0.01)
    assert len(rates) <= SWEEP_AT


@pytest.mark.covers("security:slow-bodies")
def test_bytes_of_messages_are_counted_per_token_and_in_all(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    counted, most = Quotas(settings, SettableClock()), settings.message_bytes_per_token
    with ExitStack() as held:
        held.enter_context(counted.message(A, most - 1))
        with pytest.raises(Problem, match="too-many-requests"):
            held.enter_context(counted.message(A, 2))
        for number in range(1, ALL_TOKENS):
            held.enter_context(counted.message(bytes([number]), most))
        held.enter_context(counted.message(B, 1))
        with pytest.raises(Problem, match="of all tokens"):
            held.enter_context(counted.message(B, 1))
    with counted.message(A, most):
        pass
