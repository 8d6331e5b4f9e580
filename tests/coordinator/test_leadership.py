"""One of several coordinators leads: the lease, the fencing token, and what a standby does with requests."""

import asyncio
import itertools
import logging
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy import URL, Connection, Engine, make_url, text
from sqlalchemy.exc import DBAPIError, OperationalError
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from coordinator.api.metrics.server import PeersCollector
from coordinator.http import downloads
from coordinator.leadership.election import GIVE_WAY_S, MARGIN_S, Election
from coordinator.leadership.standby import Standby
from coordinator.leadership.terms import Terms
from coordinator.server import make_server
from coordinator.settings import Settings
from coordinator.store import lease
from coordinator.store import postgresql as backend
from coordinator.store.blobs import PROBE_S, StoreProbe
from coordinator.store.database import Database, Fence
from harness import stores
from harness.coordinator import SettableClock, coordinator_thread
from harness.postgres import PostgreSQL, postgresql
from harness.tunnel import tunnel
from protocol.errors import OuterstepError, Problem
from tests.coordinator.crew import connected, crew, events, info, play_round, play_rounds, problem, two
from tests.support.threads import at_once
from tests.support.waiting import PATIENCE_S, wait_until


@pytest.fixture
def url(postgres: PostgreSQL) -> Iterator[str]:
    """The URL of an empty database."""
    with postgres.database() as found:
        yield found


@pytest.fixture
def engine(url: str) -> Iterator[Engine]:
    Database(make_url(url)).close()
    engine = backend.engine_of(make_url(url))
    yield engine
    engine.dispose()


# --- the lease --------------------------------------------------------------------------------------------------------


def test_the_lease_is_one_coordinators_until_it_expires_or_is_released(engine: Engine) -> None:
    with engine.connect() as connection:
        assert lease.read(connection).is_vacant
        assert lease.take(connection, "a", "http://a") == 1
        assert lease.take(connection, "b", "http://b") is None
        found = lease.read(connection)
        assert (found.token, found.holder, found.address, found.is_vacant) == (1, "a", "http://a", False)
        assert lease.LEASE_S / 2 < found.remaining_s <= lease.LEASE_S
        assert abs(found.now - time.time()) < 60
        assert lease.renew(connection, 1)
        connection.execute(text("UPDATE leader SET expires_at = 0"))
        assert lease.renew(connection, 1), "nobody else has taken it"
        connection.execute(text("UPDATE leader SET expires_at = 0"))
        assert lease.take(connection, "b", "http://b") == 2
        assert not lease.renew(connection, 1)
        lease.release(connection, 1)  # by the old leader: without effect
        assert lease.read(connection).holder == "b"
        lease.release(connection, 2)
        assert not lease.renew(connection, 2)
        assert lease.take(connection, "a", "http://a") == 3


def test_of_many_that_take_an_expired_lease_at_once_one_gets_it(url: str, engine: Engine) -> None:
    with ExitStack() as stack:
        own = [stack.enter_context(connected(url)) for _ in range(8)]
        tokens = at_once(8, lambda number: lease.take(own[number], f"c{number}", ""))
    assert sorted(tokens, key=str) == [1, *[None] * 7]


def test_a_coordinator_takes_the_place_of_an_earlier_process_at_its_address(engine: Engine) -> None:
    """One that was killed stayed in the list, with the advice to start it again, beside the one that was started."""
    with engine.connect() as connection:
        for id_, address in (("killed", "http://a"), ("b", "http://b"), ("started", "http://a")):
            lease.report(connection, id_, address, "1", "")
        found = [(each.id, each.address) for each in lease.peers(connection)]
        assert found == [("b", "http://b"), ("started", "http://a")]
        connection.execute(text("UPDATE coordinators SET seen_at = seen_at - 599 WHERE id = 'b'"))
        assert len(lease.peers(connection)) == 2
        connection.execute(text("UPDATE coordinators SET seen_at = seen_at - 2 WHERE id = 'b'"))
        assert [each.id for each in lease.peers(connection)] == ["started"], "without anybody who registers"


# --- fencing ----------------------------------------------------------------------------------------------------------


def fence(token: int) -> Fence:
    return Fence(token, "a", lambda: True, lambda: None)


ADD_AUDIT_ROW = text("INSERT INTO audit (at, act, message) VALUES (0, 'x', 'y')")


def add_audit_row(database: Database) -> None:
    with database.write() as session:
        session.execute(ADD_AUDIT_ROW)


@pytest.mark.covers("security:superseded-leader")
def test_a_coordinator_that_was_superseded_can_write_nothing(url: str, engine: Engine) -> None:
    with engine.connect() as connection:
        assert lease.take(connection, "a", "") == 1
        old, new = fence(1), fence(2)
        first, second = Database(make_url(url), old), Database(make_url(url), new)
        add_audit_row(first)
        with pytest.raises(Problem, match="no longer leads"):
            add_audit_row(second)  # its token is not there yet
        lease.release(connection, 1)
        assert lease.take(connection, "b", "") == 2
        for _ in range(2):
            with pytest.raises(Problem) as refused:
                add_audit_row(first)
            assert refused.value.slug == "superseded"
        assert old.lost.is_set()
        third = Database(make_url(url), fence(2))
        add_audit_row(third)
        assert connection.execute(text("SELECT count(*) FROM audit")).scalar_one() == 2
        for each in (first, second, third):
            each.close()


def test_a_takeover_waits_for_the_write_in_progress(url: str, engine: Engine) -> None:
    """Otherwise the old leader could commit after the new one has read the rows."""
    with engine.connect() as connection:
        lease.take(connection, "a", "")
    database = Database(make_url(url), fence(1))

    def take_over() -> int | None:
        with connected(url) as other:
            lease.release(other, 1)
            return lease.take(other, "b", "")

    with ThreadPoolExecutor(1) as others:
        with database.write() as session:
            taken = others.submit(take_over)
            session.execute(ADD_AUDIT_ROW)
            with engine.connect() as connection:
                wait_until(lambda: waiting_for_locks(connection))
            assert not taken.done()
        assert taken.result() == 2
    with pytest.raises(Problem):
        add_audit_row(database)
    database.close()


def waiting_for_locks(connection: Connection) -> bool:
    query = text(
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    return bool(connection.execute(query).scalar_one())


@pytest.mark.slow
def test_a_paused_write_does_not_keep_others_from_leading(
    url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends a transaction that is idle for too long. What it wrote is gone, and its coordinator knows."""
    monkeypatch.setattr(backend, "IDLE_S", 1)

    def write_and_pause() -> None:
        with database.write() as session:
            session.execute(ADD_AUDIT_ROW)
            lease.release(connection, 1)  # waits until the server has ended this transaction
            assert lease.take(connection, "b", "") == 2

    with engine.connect() as connection:
        lease.take(connection, "a", "")
        database = Database(make_url(url), fence(1))
        with pytest.raises(DBAPIError):
            write_and_pause()
        assert connection.execute(text("SELECT count(*) FROM audit")).scalar_one() == 0
        database.close()


def test_a_takeover_ends_the_sessions_of_the_expired_holder(url: str, engine: Engine) -> None:
    """A paused one may hold the lock of the row where the server's limit for idle transactions does not apply: in the
    middle of a batch of statements."""
    paused, _ = backend.engines(backend.named(make_url(url), "a"))
    with engine.connect() as connection:
        assert lease.take(connection, "a", "") == 1
        connection.execute(text("UPDATE leader SET expires_at = 0"))
        with paused.connect() as other:
            other.execute(text("SET TRANSACTION READ WRITE; SET LOCAL idle_in_transaction_session_timeout = 0"))
            other.execute(text("SELECT token FROM leader FOR UPDATE"))
            assert lease.take(connection, "b", "") == 2
            with pytest.raises(DBAPIError):
                other.execute(text("SELECT 1"))
    paused.dispose()


# --- the election -----------------------------------------------------------------------------------------------------


def election(
    url: URL | str, clock: SettableClock, probe: StoreProbe | None = None, address: str = "http://here"
) -> Election:
    """A coordinator that takes part when `step` is called."""
    made = Election(make_url(url), address, probe or StoreProbe(lambda: None, clock), clock)
    made.step()
    return made


def test_a_lease_that_could_not_be_given_up_is_taken_again_at_once(
    url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a crash of the database in the middle of a commit: the coordinator need not wait for its own lease."""

    def fails(*_: object) -> None:
        raise OperationalError("", None, ConnectionError("the server has crashed"))

    clock = SettableClock()
    first, other = election(url, clock), election(url, clock, address="http://there")
    assert first.fence is not None
    with monkeypatch.context() as away:
        away.setattr(lease, "release", fails)
        first.finish(first.fence)
    with engine.connect() as connection:
        assert not lease.read(connection).is_vacant
    other.step()
    assert other.fence is None, "to others the lease is valid"
    first.step()
    assert first.fence is not None
    assert (first.fence.token, first.leads()) == (2, True)
    with monkeypatch.context() as away, engine.connect() as connection:
        away.setattr(lease, "release", fails)
        first.finish(first.fence)
        connection.execute(text("UPDATE leader SET expires_at = 0"))
    first.step()
    assert first.leads(), "nor did it end its own session"
    for each in (first, other):
        each.engine.dispose()


class Store:
    """A store that answers, or does not."""

    def __init__(self, clock: SettableClock, *, answers: bool) -> None:
        self.answers = answers
        self.probe = StoreProbe(self._ask, clock)

    def _ask(self) -> None:
        if not self.answers:
            raise OSError("no route to the store")


def test_a_leader_stops_leading_before_its_lease_expires_though_the_database_does_not_answer(
    url: str, engine: Engine
) -> None:
    clock = SettableClock()
    with tunnel(make_url(url).port or 0) as line:
        a = election(make_url(url).set(port=line.port), clock)
        assert a.leads()
        line.cut()
        clock.advance(lease.LEASE_S - MARGIN_S - 0.5)
        a.step()
        assert a.fault
        assert a.leads()
        clock.advance(0.6)
        assert not a.leads(), "by its own clock, the lease is over a second before it is by the database's"
        term = a.fence
        assert term is not None
        a.step()
        assert term.lost.is_set()
        line.mend()
        a.step()
        assert not a.leads(), "the term is not finished"
        a.finish(term)
        a.step()
        assert a.leads()
        assert a.fence is not None
        assert a.fence.token == 2


@pytest.mark.usefixtures("shipped_times")
def test_a_leader_whose_store_is_out_of_reach_gives_way_only_to_one_that_can_reach_it(url: str, engine: Engine) -> None:
    clock = SettableClock()
    near, far = Store(clock, answers=False), Store(clock, answers=False)
    a = election(url, clock, near.probe)

    def pass_time() -> None:
        """Longer than a store may be silent; nothing but the stores fails."""
        for _ in range(6):
            clock.advance(GIVE_WAY_S / 5)
            for each in (near, far):
                each.probe.run()
            a.step()

    assert a.leads()
    pass_time()
    assert a.leads(), "there is nobody else"
    b = election(url, clock, far.probe, "http://there")
    pass_time()
    assert a.leads(), "the other one cannot reach it either"
    far.answers = True
    far.probe.run()
    b.step()
    term = a.fence
    a.step()
    assert not a.leads()
    b.step()
    assert b.leads()
    assert {each.id: bool(each.store_fault) for each in b.peers.all} == {a.id: True, b.id: False}
    assert term is not None
    a.finish(term)
    a.step()
    assert not a.leads()


@pytest.mark.usefixtures("shipped_times")
def test_a_leader_keeps_its_lease_in_an_outage_of_the_store_that_another_has_not_noticed_yet(
    url: str, engine: Engine
) -> None:
    """Whoever noticed it first gave up the lease to one that could not use the store either."""
    clock = SettableClock()
    here, there = Store(clock, answers=True), Store(clock, answers=True)
    a, b = election(url, clock, here.probe), election(url, clock, there.probe, "http://there")
    here.answers = there.answers = False
    here.probe.run()
    for _ in range(20):
        clock.advance(PROBE_S / 2)
        a.step()
        there.probe.run()  # up to PROBE_S later
        b.step()
        assert a.leads()
    assert a.store_fault == b.store_fault == "no route to the store"
    for each in (a, b):
        each.engine.dispose()


@pytest.mark.usefixtures("shipped_times")
def test_a_database_that_hangs_is_reported_and_logged(
    url: str, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps its connections and answers nothing, so no question fails."""
    caplog.set_level("INFO", "coordinator.leadership.election")
    clock = SettableClock()
    with tunnel(make_url(url).port or 0) as line:
        a = election(make_url(url).set(port=line.port), clock)
        terms = Terms(a, lambda _: pytest.fail("no term"), lambda _: pytest.fail("no term"), lambda: None)
        a.watch()
        line.freeze()
        step = threading.Thread(target=a.step)
        step.start()
        wait_until(lambda: a.asked_at is not None)
        clock.advance(4.4)
        assert (a.leads(), a.fault, terms.fault) == (False, "no answer for 4 s", "the database: no answer for 4 s")
        ready = Starlette(routes=[Mount("/", Standby(terms, a.engine, PeersCollector(a.peers)))])
        reply = TestClient(ready).get("/readyz")
        assert (reply.status_code, reply.json()["detail"]) == (503, "the database: no answer for 4 s")
        a.watch()
        a.watch()
        line.mend()
        step.join()
        assert (a.fault, a.leads()) == ("", True)
        a.watch()
    said = [record.getMessage() for record in caplog.records if record.name == "coordinator.leadership.election"]
    assert said[-2:] == ["the database cannot be used: no answer for 4 s", "the database answers again"]
    a.engine.dispose()


def test_a_statement_fails_once_the_server_has_been_silent_for_too_long(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a thread waits for as long as the server hangs, and forever if its machine never continues. Time passes
    only while the line is frozen."""
    frozen, times = threading.Event(), itertools.count(step=backend.ANSWER_S)
    clock = SimpleNamespace(monotonic=lambda: next(times) if frozen.is_set() else 0.0)
    monkeypatch.setattr(backend, "time", clock)
    with tunnel(make_url(url).port or 0) as line:
        hanging = backend.engine_of(make_url(url).set(port=line.port))
        with hanging.connect() as connection:
            line.freeze()
            frozen.set()
            with pytest.raises(OperationalError, match="the server has not answered for") as failed:
                connection.execute(text("SELECT 1"))
            assert backend.fault(failed.value) is not None
            assert connection.invalidated
        frozen.clear()
        line.mend()
        with hanging.connect() as connection:
            assert connection.execute(text("SELECT 1")).scalar_one() == 1
        hanging.dispose()


def test_the_time_of_day_is_the_databases(url: str, engine: Engine) -> None:
    """A coordinator whose own clock is an hour off would let tokens expire an hour early."""
    clock = SettableClock(5.0)
    a = election(url, clock)
    with engine.connect() as connection:
        found = lease.read(connection).now
    assert abs(a.now() - found) < PATIENCE_S
    clock.advance(100 * PATIENCE_S)
    assert 99 * PATIENCE_S < a.now() - found < 101 * PATIENCE_S


# --- a leader and a standby -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_standby_forwards_everything_and_takes_over(tmp_path: Path, url: str) -> None:
    with two(tmp_path, url) as (leader, standby):
        assert leader.client().get("/readyz").json()["status"] == "ready"
        assert standby.client().get("/readyz").json()["status"] == "standby"
        members = crew(standby, "r", ["a", "b"], rounds=3, min_workers=2)
        play_rounds(leader, members, [0])
        assert info(standby, "r")["round"] == 1
        logging.getLogger("coordinator.trial").warning("before the takeover")
        leader.server.should_exit = True
        wait_until(lambda: standby.client().get("/readyz").json()["status"] == "ready")
        assert leader.server.shared is not None
        for round_ in (1, 2):
            play_round(members, round_)
        standby.await_state("r", 3)
        assert standby.live("r").final_digest is not None
        logged = [each["message"] for each in standby.client().get("/v1/status").json()["errors"]]
        assert "before the takeover" in logged, "a takeover forgets nothing that this process has logged"
        (finished,) = events(standby, "r", "finished")
        assert finished["message"] == "the run is finished after 3 rounds"


@pytest.mark.slow
def test_a_standby_sends_deltas_and_checkpoints_itself(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader only names the blob. What the standby cannot read, the leader sends."""
    with two(tmp_path, url) as (leader, standby):
        play_rounds(leader, crew(standby, "r", ["a", "b"], rounds=3, min_workers=2), [0])
        delta, state = "/v1/runs/r/rounds/0/fragments/0/delta", "/v1/runs/r/checkpoints/0/fragments/0"
        for path, applied in ((delta, "wait=5"), (state, None)):
            whole = leader.client().get(path)
            with standby.client() as client, monkeypatch.context() as of_leader:
                of_leader.setattr(downloads, "memory_response", None)
                found = client.get(path)
                assert found.content == whole.content
                assert client.get(path, headers={"Prefer": "wait=5"}).headers.get("Preference-Applied") == applied
                assert downloads.BLOB_HEADER not in found.headers
                for name in ("ETag", "Cache-Control", "Content-Length", "Content-Type", "X-Content-Type-Options"):
                    assert found.headers.get(name) == whole.headers.get(name)
                part = client.get(path, headers={"Range": "bytes=5-9"})
                assert part.status_code == 206
                assert part.content == whole.content[5:10]
                assert part.headers["Content-Range"] == f"bytes 5-9/{len(whole.content)}"
                assert client.get(path, headers={"If-None-Match": whole.headers["ETag"]}).status_code == 304
                head = client.head(path)
                assert (head.content, head.headers["Content-Length"]) == (b"", str(len(whole.content)))
                problem(client.get(path, headers={"Range": "bytes=99999999-"}), "range-not-satisfiable")
                problem(httpx.get(f"{standby.url}{path}"), "unauthorized")
            assert standby.server.shared is not None
            with monkeypatch.context() as of_standby:
                of_standby.setattr(standby.server.shared, "_blobs", None)
                of_standby.setattr(standby.server.shared, "_open_blobs", fails)
                assert standby.client().get(path).content == whole.content


def fails() -> Any:
    raise OuterstepError("this process cannot reach the bucket")


@pytest.mark.slow
def test_a_commit_whose_reply_is_lost_is_known_after_the_next_takeover(tmp_path: Path, url: str) -> None:
    """It may have happened, so memory is built again from the rows: by the same coordinator, in a new term."""
    blobs, address = stores.MemoryBlobs(), make_url(url)
    with tunnel(address.port or 0) as line:
        through = address.set(port=line.port).render_as_string(hide_password=False)
        with coordinator_thread(tmp_path / "a", database=through, store=lambda _: blobs) as running:
            (member,) = crew(running, "r", ["w"], rounds=2)
            before = running.live("r")
            line.lose_answer_after(b"UPDATE runs", b"COMMIT")
            with running.client() as admin:
                problem(admin.patch("/v1/runs/r", json={"state": "paused"}), "not-ready")
                assert line.lost.is_set()
                wait_until(lambda: admin.get("/v1/runs/r").is_success)
                assert admin.get("/v1/runs/r").json()["state"] == "paused", "it was committed"
                assert running.live("r") is not before
                admin.patch("/v1/runs/r", json={"state": "running"}).raise_for_status()
            play_rounds(running, [member], range(2))


@pytest.mark.system
def test_the_database_may_be_restarted(tmp_path: Path) -> None:
    blobs = stores.MemoryBlobs()
    with (
        postgresql() as server,
        coordinator_thread(tmp_path / "a", database=server.url(), store=lambda _: blobs) as running,
        running.client() as admin,
    ):
        (member,) = crew(running, "r", ["w"], rounds=1)
        server.kill()
        wait_until(lambda: not admin.get("/readyz").is_success)
        document = problem(admin.patch("/v1/runs/r", json={"state": "paused"}), "not-ready")
        assert re.search("database does not answer|no coordinator leads", document["detail"])
        server.start()
        wait_until(lambda: admin.get("/readyz").is_success)
        # It is ready by a read; the first write may find that its connection has ended, and is to be repeated.
        wait_until(lambda: admin.post("/v1/tokens", json={"scope": "viewer"}).is_success)
        play_rounds(running, [member], [0])


@pytest.mark.slow
def test_a_standby_that_cannot_reach_the_leader_is_not_ready(tmp_path: Path, url: str) -> None:
    """So that the load balancer sends requests to the leader; and a client's next connection may get there."""
    with two(tmp_path, url, addresses=("http://127.0.0.1:1", "http://127.0.0.1:2")) as (leader, standby):
        reply = standby.client().get("/v1/runs")
        assert "the leader does not answer" in problem(reply, "not-ready")["detail"]
        assert reply.headers["connection"] == "close"
        problem(standby.client().get("/readyz"), "not-ready")
        leader.client().get("/v1/runs").raise_for_status()


@pytest.mark.slow
def test_a_second_coordinator_at_the_same_address_is_refused(tmp_path: Path, url: str) -> None:
    """As on two machines by default, where each listens on 127.0.0.1: a standby would forward to itself."""
    blobs = stores.MemoryBlobs()
    same: dict[str, Any] = {"database": url, "advertise_url": "http://127.0.0.1:8470"}
    with coordinator_thread(tmp_path / "a", store=lambda _: blobs, **same):
        server, listening = make_server(Settings(data_dir=tmp_path / "b", port=0, **same), store=lambda _: blobs)
        asyncio.run(server.serve(sockets=[listening]))
    assert "is this coordinator's own: give each coordinator another --advertise-url" in str(server.failure)


def test_a_coordinator_that_starts_again_at_its_address_waits_for_its_own_lease(tmp_path: Path, url: str) -> None:
    Database(make_url(url)).close()
    earlier = election(url, SettableClock())
    assert earlier.leads()
    clock = SettableClock()
    later = election(url, clock)
    terms = Terms(later, lambda _: pytest.fail("no term"), lambda _: pytest.fail("no term"), lambda: None)
    later.step()
    assert (terms.leader, terms.unreachable) == (None, "")
    earlier.step()  # it runs: somebody else has the same address
    later.step()
    assert terms.leader is not None
    assert "--advertise-url" in terms.unreachable


def test_an_address_for_others_is_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(OuterstepError, match="leave it out with SQLite"):
        make_server(Settings(data_dir=tmp_path, port=0, advertise_url="http://10.0.0.2:8470"))
    assert not list(tmp_path.iterdir())
