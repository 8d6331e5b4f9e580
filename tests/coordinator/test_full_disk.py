"""A full disk: answered with `storage-full`, told once, nothing half-written, and over when there is room."""

import itertools
import logging
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from coordinator.store import data_directory, sqlite
from coordinator.store.blobs import StoreProbe
from coordinator.store.payloads import MemoryBudget, has_digest
from coordinator.store.tables import ContributionRow, FragmentRow
from coordinator.upkeep.storage import QUIET_S, SILENT_S
from harness.coordinator import InThread, SettableClock, coordinator_thread
from harness.member import Member, spec_toml
from protocol.digest import content_digest, digest, model_digest
from tests.coordinator.crew import assigned, crew, events, info, play_round, play_rounds, problem
from tests.support.full_disk import FullDisk, small_disk
from tests.support.waiting import PATIENCE_S, wait_until


class Patient(httpx.BaseTransport):
    """Sends a request again when the disk was full, and only then."""

    def __init__(self) -> None:
        self._inner = httpx.HTTPTransport()
        self.refusals = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        while True:
            reply = self._inner.handle_request(request)
            if reply.status_code != 507:
                return reply
            assert reply.headers["retry-after"] == "10"
            reply.close()
            self.refusals += 1


def one_round(running: InThread, run: str, clock: SettableClock, transport: Patient) -> str:
    """A whole run of one round by one patient worker; the digest of its final state."""
    with httpx.Client(base_url=running.url, transport=transport, timeout=PATIENCE_S) as http:
        http.headers["Authorization"] = f"Bearer {running.admin_token}"
        http.post("/v1/runs", content=spec_toml(run, rounds=1, members="lease_s = 86400").encode()).raise_for_status()
        member = Member(http, run, "w")
        member.join(running.admin_token)
        assert member.assignment(None).action == "seed"
        member.seed()
        member.take_part(0)

        def stepped() -> bool:
            if any(job.retry_at > 0 for job in running.live(run).outer.jobs):
                clock.advance(6)
            running.coordinator.tick()
            return running.live(run).final_digest is not None

        wait_until(stepped)
        member.step(0)
        running.await_state(run, 1)
        wait_until(lambda: not any(job.running for job in running.live(run).outer.jobs))
        digest = info(running, run)["state_digest"]
        assert digest == member_digest(member)
    return str(digest)


def member_digest(member: Member) -> str:
    return model_digest(member.base(p) for p in range(len(member.theta))).hex()


def assert_nothing_half_written(running: InThread, run: str) -> None:
    live = running.live(run)
    assert list((running.data_dir / "incoming").iterdir()) == []
    with running.coordinator.database.read() as session:
        for row in session.query(ContributionRow).filter_by(run_id=live.id):
            name = live.names.contribution(row.round, row.fragment, row.worker, row.digest)
            assert live.blobs.stat(name) is None or has_digest(live.blobs, name, row.digest)
        for each in session.query(FragmentRow).filter_by(run_id=live.id):
            assert each.delta_digest is not None
            name = live.names.delta(each.round, each.fragment, each.delta_digest)
            assert has_digest(live.blobs, name, each.delta_digest)


@pytest.mark.covers("reliability:full-disk", "security:unfinished-payloads")
@pytest.mark.nightly
def test_whichever_write_finds_the_disk_full_the_run_ends_as_if_it_had_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    clock, transport = SettableClock(), Patient()
    digests, tried, failed = set(), set[str](), ["the first run: none"]

    def is_full(name: str) -> bool:
        """The first write of a kind that no run before has seen fail; one per run."""
        if failed or name in tried:
            return False
        failed.append(name)
        return True

    disk = FullDisk(tmp_path / "data", is_full)
    with pytest.MonkeyPatch.context() as patch, coordinator_thread(tmp_path / "data", clock=clock) as running:
        disk.install(patch)
        disk.watch(running.coordinator.database.reading)
        for number in itertools.count():
            run = f"r{number}"
            digests.add(one_round(running, run, clock, transport))
            assert_nothing_half_written(running, run)
            assert events(running, run, "fault") == []
            if not failed:
                break
            tried.update(failed)
            failed.clear()
    assert len(digests) == 1
    assert len(tried) > 40
    assert transport.refusals > 20, "the test did not test"


@pytest.mark.slow
@pytest.mark.in_sqlite
def test_a_disk_that_stays_full_for_a_while_is_told_once_and_then_that_it_has_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was logged at each tick, and the run said that it waited for a worker."""
    caplog.set_level(logging.INFO, "coordinator")
    clock = SettableClock()
    with small_disk(tmp_path / "disk") as disk, coordinator_thread(disk.root / "data", clock=clock) as running:
        disk.watch(running.coordinator.database.reading)
        a, b = crew(running, "r", ["a", "b"], rounds=3, min_workers=2, members="lease_s = 1000")
        play_round([a, b], 0)
        assignment, _ = assigned([a, b], 1)
        running.await_state("r", 1)
        disk.fill()
        for _ in range(5):
            for p, values in enumerate(a.pseudo_gradients(1)):
                refused = problem(a.contribute(assignment, p, values), "storage-full")
                assert "disk is full" in refused["detail"]
            running.coordinator.tick()
            clock.advance(1)
        heartbeat = a.http.put(a.path("/lease"), json={}).raise_for_status().json()
        assert a.delta(0, 0).status_code == 200
        shown = info(running, "r")
        assert (shown["held_up_by"], shown["eta_s"]) == ("storage-full", None)
        for told in (shown["reason"], info(running, "r", "/rounds/1")["reason"], heartbeat["reason"]):
            assert "disk is full" in told, "no worker is to blame"
        assert 'held_up{cause="storage-full",run="r"} 1.0' in running.client().get("/metrics").text
        disk.make_room()
        play_round([a, b], 1)
        running.coordinator.tick()
        assert len(events(running, "r", "storage-full")) == 1
        assert events(running, "r", "storage-room") == []
        clock.advance(QUIET_S)
        running.coordinator.tick()
        assert len(events(running, "r", "storage-full")) == len(events(running, "r", "storage-room")) == 1
        assert info(running, "r")["held_up_by"] is None
        about_it = [each for each in caplog.records if "coordinator's disk" in each.getMessage()]
        levels = [each.levelname for each in about_it if each.name == "coordinator.upkeep.storage"]
        assert levels == ["ERROR", "WARNING"], "when it began and when it was over, however many writes failed"
        assert len(about_it) == len(levels) + 2, "and each of the events, once it was committed"
        play_rounds(running, [a, b], [2])
        assert_nothing_half_written(running, "r")


@pytest.mark.slow
@pytest.mark.covers("security:unfinished-payloads")
def test_uploads_leave_the_room_that_the_run_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-sent payloads filled the disk, and with it the database."""
    clock = SettableClock()
    with coordinator_thread(tmp_path / "data", clock=clock) as running:
        (a,) = crew(running, "r", ["a"], rounds=1, members="lease_s = 1000")
        monkeypatch.setattr(running.coordinator, "memory", MemoryBudget(0))  # so that uploads go through files
        assignment, path = a.assignment(0), a.contribution_path(0, 0)
        body = a.payload(assignment, 0, a.pseudo_gradients(0)[0])
        described = {"Repr-Digest": content_digest(digest(body))}
        first, rest = ({"Content-Range": f"bytes {each}/{len(body)}"} for each in ("0-99", f"100-{len(body) - 1}"))
        assert a.put(path, body[:100], **first, **described).status_code == 202
        with monkeypatch.context() as patch:
            patch.setattr(data_directory, "RESERVED_BYTES", 1 << 60)
            patch.setattr(data_directory, "RESERVED_SHARE", 1.0)
            problem(a.put(path, body), "storage-full")
            problem(a.put(path, body[100:], **rest, **described), "storage-full")
            clock.advance(QUIET_S)
            running.coordinator.tick()
            assert info(running, "r")["held_up_by"] == "storage-full", "the probe takes none of it either"
            assert len(events(running, "r", "storage-full")) == 1, "which was written"
        clock.advance(QUIET_S)
        running.coordinator.tick()
        assert info(running, "r")["held_up_by"] is None
        assert a.put(path, body[100:], **rest, **described).status_code == 201
        a.take_part(0)
        a.step(0)
        running.await_state("r", 1)
        assert_nothing_half_written(running, "r")


@pytest.mark.slow
@pytest.mark.in_sqlite
def test_a_database_that_another_process_has_locked_is_told_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_S", 0.02)
    clock = SettableClock()
    with coordinator_thread(tmp_path / "data", clock=clock) as running:
        a, b = crew(running, "r", ["a", "b"], rounds=1, min_workers=2, members="lease_s = 1000")
        assigned([a, b], 0)
        with closing(sqlite3.connect(tmp_path / "data" / sqlite.FILE)) as other:
            other.execute("BEGIN IMMEDIATE")
            for _ in range(5):
                problem(a.contribute(a.assignment(0), 0, a.pseudo_gradients(0)[0]), "not-ready")
            shown = info(running, "r")
            assert (shown["held_up_by"], shown["eta_s"]) == ("storage-unavailable", None)
            assert "has locked" in shown["reason"]
        play_rounds(running, [a, b], [0])
        clock.advance(QUIET_S)
        running.coordinator.tick()
        assert info(running, "r")["held_up_by"] is None
        assert len(events(running, "r", "storage-unavailable")) == 1
    lines = [each.levelname for each in caplog.records if each.name == "coordinator.upkeep.storage"]
    assert lines == ["ERROR", "WARNING"]


def test_a_bucket_that_hangs_is_named_though_no_write_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It answers nothing for minutes, and meanwhile the run seemed to wait for its workers."""
    clock, answers = SettableClock(), threading.Event()
    probe = StoreProbe(answers.wait, clock)
    with coordinator_thread(tmp_path, clock=clock) as running:
        crew(running, "r", ["w"], members="lease_s = 86400")
        running.coordinator.storage.probe = probe
        asking = threading.Thread(target=probe.run)
        asking.start()
        wait_until(lambda: probe.asked_at is not None)
        clock.advance(SILENT_S - 1)
        running.coordinator.tick()
        assert info(running, "r")["held_up_by"] is None
        clock.advance(2.4)
        for _ in range(2):
            running.coordinator.tick()
        named = "the bucket: no answer for 16 s"
        shown = info(running, "r")
        assert (shown["reason"], shown["held_up_by"]) == (named, "storage-unavailable")
        found = running.client().get("/v1/status").json()["findings"]
        assert [(each["about"], each["message"]) for each in found] == [("bucket", named)]
        said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert [line.partition(" (")[0] for line in said] == [named]
        answers.set()
        asking.join()
        clock.advance(QUIET_S + 1)

        def recorded() -> bool:
            running.coordinator.tick()
            return len(events(running, "r", "storage-unavailable")) == 1

        wait_until(recorded)
        assert info(running, "r")["held_up_by"] is None
        (event,) = events(running, "r", "storage-unavailable")
        assert event["message"] == f"for 16.4 s nothing could be written: {named}"
