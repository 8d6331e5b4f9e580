"""Files that are no longer what was written: found by their digests, made again where that is possible."""

import math
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import delete

from coordinator.run.live_run import LiveRun
from coordinator.store.payloads import MemoryBudget
from coordinator.store.tables import FragmentRow, UnitRangeRow
from coordinator.sync.deltas import rebuild_delta_if_damaged
from coordinator.upkeep.verifying import verify
from harness.coordinator import InThread, coordinator_thread
from harness.member import Member
from harness.stores import names, read, spoil, the
from tests.coordinator.crew import crew, events, info, play_rounds, problem, ready
from tests.support.waiting import wait_until


def verified(running: InThread, run: str) -> LiveRun:
    """The run, once its files were verified after its start: otherwise that makes again what a test has just spoilt."""
    live, verify_at = running.live(run), running.coordinator.verify_at
    wait_until(lambda: math.isfinite(verify_at.get(live.id, math.inf)))
    return live


def played(running: InThread, run: str, names: str, rounds: int, checkpoints: str) -> tuple[list[Member], LiveRun]:
    """The members of a run that has played so many rounds, and the run, verified."""
    members = crew(running, run, list(names), rounds=300, checkpoints=checkpoints)
    play_rounds(running, members, range(rounds))
    return members, verified(running, run)


def two_of_whom_a_has_contributed(running: InThread, run: str, **spec: Any) -> tuple[Member, Member, list[str]]:
    """a, b, and the blobs of what a has contributed to round 0."""
    a, b = crew(running, run, ["a", "b"], rounds=1, **spec)
    ready([a, b], 0)
    a.take_part(0)
    return a, b, names(running.live(run), "contributions", 0)


@pytest.fixture
def no_room(shared: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """No contribution is in memory, as after a start, or of very many workers."""
    monkeypatch.setattr(shared.coordinator, "memory", MemoryBudget(0))


def state_of(running: InThread, run: str) -> str:
    return str(info(running, run)["state_digest"])


@pytest.mark.slow
@pytest.mark.covers("reliability:damaged-files")
@pytest.mark.usefixtures("no_room")
@pytest.mark.parametrize("everything", [False, True], ids=["one fragment", "all of it"])
def test_a_contribution_that_the_disk_lost_is_asked_for_again_and_nothing_else_changes(
    shared: InThread, run: str, everything: bool
) -> None:
    """Of its units, those of which the disk lost everything are consumed again with it."""
    a, b, _ = two_of_whom_a_has_contributed(shared, f"{run}-sound", min_workers=2)
    b.take_part(0)
    for member in (a, b):
        member.step(0)
    a, b, contributions = two_of_whom_a_has_contributed(shared, run, min_workers=2)
    if everything:
        for name in contributions:
            shared.live(run).blobs.delete(name)
    else:
        spoil(shared.live(run).blobs, the(shared.live(run), "contributions", 0, 0))
    b.take_part(0)
    lost = (0, 1) if everything else (0,)
    for p in lost:
        problem(a.delta(0, p), "contribution-lost")
    assert events(shared, run, "contribution-lost")[0]["data"]["workers"] == ["a"]
    assert "waiting for 1 of 2 workers (a)" in info(shared, run, "/rounds/0")["fragments"][0]["reason"]
    assert info(shared, run)["tokens"] == (5 if everything else 10) * 32
    for p in lost:
        assert a.contribute(a.assignment(0), p, a.pseudo_gradients(0)[p]).status_code == 201
    for member in (a, b):
        member.step(0)
    for name in (run, f"{run}-sound"):
        shared.await_state(name, 1)
        workers = [(each["contributions"], each["tokens"]) for each in info(shared, name, "/workers")["items"]]
        assert (workers, info(shared, name)["tokens"]) == ([(1, 5 * 32)] * 2, 10 * 32)
    assert state_of(shared, run) == state_of(shared, f"{run}-sound")


def test_a_contribution_that_the_disk_lost_while_it_was_in_memory_is_averaged_all_the_same(
    shared: InThread, run: str
) -> None:
    a, b, contributions = two_of_whom_a_has_contributed(shared, run, min_workers=2)
    for name in contributions:
        spoil(shared.live(run).blobs, name)
    b.take_part(0)
    for member in (a, b):
        member.step(0)
    shared.await_state(run, 1)
    assert events(shared, run, "contribution-lost") == []


@pytest.mark.usefixtures("no_room")
def test_a_dead_workers_contribution_that_the_disk_lost_is_done_without_and_its_units_return(
    shared: InThread, run: str
) -> None:
    a, b, contributions = two_of_whom_a_has_contributed(shared, run)
    for name in contributions:
        shared.live(run).blobs.delete(name)
    assert a.http.delete(a.path()).status_code == 204
    b.take_part(0)
    b.step(0)
    live = verified(shared, run)
    with shared.coordinator.database.read() as session:
        free = session.query(UnitRangeRow).filter_by(run_id=live.id, state="free").all()
    assert [(row.start, row.stop) for row in free] == [(0, 5)]
    assert info(shared, run)["tokens"] == 5 * 32
    assert info(shared, run, "/workers/a")["contributions"] == 0


@pytest.mark.slow
def test_spoilt_deltas_are_made_again_after_a_start(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        a, b = crew(running, "r", ["a", "b"], rounds=3)
        play_rounds(running, [a, b], range(2))
        live = running.live("r")
        name = the(live, "deltas", 0, 1)
        before = read(live.blobs, name)
    spoil(live.blobs, name)
    with coordinator_thread(tmp_path / "data") as running:
        wait_until(lambda: len(events(running, "r", "mended")) == 1)
        assert "same bytes" in events(running, "r", "mended")[0]["message"]
        assert read(running.live("r").blobs, name) == before


def test_a_delta_that_cannot_be_made_again_is_gone_and_told_once(shared: InThread, run: str) -> None:
    (a,), live = played(shared, run, "a", 2, "every_rounds = 1\nkeep = 3")
    spoil(live.blobs, the(live, "deltas", 0, 0))
    for _ in range(2):
        assert not rebuild_delta_if_damaged(live, 0, 0)
    assert len(events(shared, run, "corrupt")) == 1
    problem(a.delta(0, 0), "gone")
    play_rounds(shared, [a], range(2, 3))


@pytest.mark.slow
def test_a_spoilt_checkpoint_is_made_again_from_an_older_one(shared: InThread, run: str) -> None:
    _, live = played(shared, run, "a", 3, "every_rounds = 2")
    name = the(live, "checkpoints", 2, 1)
    before = read(live.blobs, name)
    spoil(live.blobs, name)
    verify(live)
    assert read(live.blobs, name) == before
    assert "checkpoint 2 was corrupt" in events(shared, run, "mended")[0]["message"]


def fragment_of(running: InThread, run: str, checkpoint: int, fragment: int = 0) -> httpx.Response:
    with running.client() as client:
        return client.get(f"/v1/runs/{run}/checkpoints/{checkpoint}/fragments/{fragment}")


@pytest.mark.parametrize("cut", [False, True])
def test_a_deleted_checkpoint_is_found_by_its_reader_and_made_again_without_a_restart(
    shared: InThread, run: str, caplog: pytest.LogCaptureFixture, *, cut: bool
) -> None:
    """It was answered `gone`, deleted by the retention rule, and an export asked for it again for ever."""
    crew(shared, run, ["a"], rounds=5)
    live = verified(shared, run)
    name = the(live, "checkpoints", 0, 0)
    before = read(live.blobs, name)
    live.blobs.delete(name)
    if cut:
        live.blobs.put(name, before[:-1])
    assert problem(fragment_of(shared, run, 0), "not-ready")
    wait_until(lambda: fragment_of(shared, run, 0).status_code == 200)
    assert fragment_of(shared, run, 0).content == before
    wait_until(lambda: bool(events(shared, run, "mended")))  # the event is recorded after the file is there
    (mended,) = events(shared, run, "mended")
    assert ("corrupt" if cut else "missing") in mended["message"]
    assert [each.levelname for each in caplog.records if mended["message"] in each.getMessage()] == ["WARNING"]


@pytest.mark.slow
def test_checkpoints_that_cannot_be_made_again_are_marked_and_nobody_is_sent_to_them(
    shared: InThread, run: str
) -> None:
    """A dropped one was said to have been deleted by the retention rule."""
    _, live = played(shared, run, "a", 2, "every_rounds = 1\nkeep = 3")
    deleted = {name: read(live.blobs, name) for name in (the(live, "checkpoints", round_, 0) for round_ in (0, 1))}
    for name in deleted:
        live.blobs.delete(name)
    verify(live)
    verify(live)
    damaged = {each["round"]: each["damage"] for each in info(shared, run, "/checkpoints")["items"]}
    assert damaged[2] is None
    assert "missing" in damaged[0]
    assert "missing" in damaged[1]
    assert len(events(shared, run, "corrupt")) == 2
    assert info(shared, run, "/checkpoints/latest")["round"] == 2
    for round_ in (0, 1):
        assert "take another checkpoint (2)" in problem(fragment_of(shared, run, round_), "file-lost")["detail"]
    for name, content in deleted.items():
        live.blobs.put(name, content)
    verify(live)
    assert {each["damage"] for each in info(shared, run, "/checkpoints")["items"]} == {None}
    assert fragment_of(shared, run, 0).status_code == 200


def test_the_only_checkpoint_is_replaced_by_one_of_the_current_state(shared: InThread, run: str) -> None:
    """No worker could join until the next one was due."""
    (a,), live = played(shared, run, "a", 1, "every_rounds = 100")
    live.blobs.delete(the(live, "checkpoints", 0, 1))
    wait_until(lambda: verify(live))  # the job of a fragment may still be at work
    assert [each["round"] for each in info(shared, run, "/checkpoints")["items"]] == [1]
    latest = info(shared, run, "/checkpoints/latest")
    assert (latest["round"], fragment_of(shared, run, 1, 1).status_code) == (1, 200)
    play_rounds(shared, [a], range(1, 2))


def test_a_run_that_has_lost_its_only_checkpoint_and_its_state_says_so(shared: InThread, run: str) -> None:
    crew(shared, run, ["a"], rounds=5, checkpoints="every_rounds = 2")
    live = verified(shared, run)
    only = the(live, "checkpoints", 0, 0)
    spoil(live.blobs, only)
    live.outer.files.path(0, 0).unlink()
    verify(live)
    assert len(events(shared, run, "corrupt")) == 2
    assert live.blobs.stat(only) is not None
    shown = info(shared, run)
    assert (shown["held_up_by"], "from a backup" in shown["reason"]) == ("files-damaged", True)
    problem(fragment_of(shared, run, 0), "file-lost")
    with shared.client() as client:
        problem(client.get(f"/v1/runs/{run}/checkpoints/latest"), "file-lost")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["deleted", "cut", "corrupt"])
def test_a_state_file_that_is_no_longer_what_was_written_is_derived_again_without_a_restart(
    shared: InThread, run: str, how: str
) -> None:
    """Its round was never over until a restart; of a flipped bit the next state was made."""
    (a,), live = played(shared, run, "a", 1, "every_rounds = 100")
    path = live.outer.files.path(0, 1)
    content = path.read_bytes()
    path.unlink()
    if how == "cut":
        path.write_bytes(content[:-1])
    if how == "corrupt":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        wait_until(lambda: verify(live))
    play_rounds(shared, [a], range(1, 2))
    assert len(events(shared, run, "rederived")) == 1
    assert events(shared, run, "fault") == []
    assert info(shared, run)["divergences"] == 0


@pytest.mark.slow
def test_a_deleted_delta_is_made_again_for_its_reader(shared: InThread, run: str) -> None:
    (a, _), live = played(shared, run, "ab", 2, "every_rounds = 100")
    name = the(live, "deltas", 0, 0)
    before = read(live.blobs, name)
    live.blobs.delete(name)
    problem(a.delta(0, 0), "not-ready")
    wait_until(lambda: a.delta(0, 0).status_code == 200)
    assert read(live.blobs, name) == before


@pytest.mark.slow
def test_the_state_is_derived_from_the_newest_sound_checkpoint_after_a_start(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        a, b = crew(running, "r", ["a", "b"], rounds=5, checkpoints="every_rounds = 2")
        play_rounds(running, [a, b], range(3))
        live = running.live("r")
    spoil(live.blobs, the(live, "checkpoints", 2, 0))
    shutil.rmtree(live.outer.files.folder)
    with coordinator_thread(tmp_path / "data") as running:
        messages = [event["message"] for event in events(running, "r", "rederived")]
        assert ["checkpoint 0" in messages[0], "checkpoint 2" in messages[1]] == [True, True]
        play_rounds(running, [a_again := renewed(running, a), renewed(running, b)], range(3, 5))
        assert info(running, "r")["divergences"] == 0
        assert a_again.name == "a"


def renewed(running: InThread, member: Member) -> Member:
    """The same member after a restart of the coordinator: its state, its token, the new address."""
    other = Member(running.client(member.joined.member_token), member.run, member.name)
    other.joined, other.spec = member.joined, member.spec
    other.theta, other.momentum = member.theta, member.momentum
    return other


@pytest.mark.slow
def test_a_run_whose_database_has_lost_a_delta_says_so_and_does_not_disturb_the_others(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        (a,) = crew(running, "lost", ["a"], rounds=5, checkpoints="every_rounds = 100")
        crew(running, "sound", ["a"])
        play_rounds(running, [a], range(2))
        lost = running.live("lost")
        with running.coordinator.database.write() as session:
            session.execute(delete(FragmentRow).where(FragmentRow.run_id == lost.id, FragmentRow.round == 0))
    shutil.rmtree(lost.outer.files.folder)
    with coordinator_thread(tmp_path / "data") as running:
        assert "no delta of round 0, fragment 0" in info(running, "lost")["reason"]
        assert "waits for workers" in info(running, "sound")["reason"]


@pytest.mark.slow
def test_a_run_whose_files_are_all_lost_says_so_and_does_not_disturb_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The start said "ready" and no more, and `status` that nothing was wrong."""
    with coordinator_thread(tmp_path / "data") as running:
        crew(running, "lost", ["a"])
        crew(running, "sound", ["a"])
        (a,) = crew(running, "finished", ["a"], rounds=1)
        play_rounds(running, [a], range(1))
        lost = [running.live(name) for name in ("lost", "finished")]
    for each in lost:
        for name in names(each, "checkpoints"):
            each.blobs.delete(name)
        shutil.rmtree(each.outer.files.folder)
    caplog.clear()
    with coordinator_thread(tmp_path / "data") as running:
        for name in ("lost", "finished"):
            assert "restore the data directory" in info(running, name)["reason"]
            (logged,) = [each for each in caplog.messages if each.startswith(f"{name}: the outer state")]
            assert f"restore the data directory of the run {name} from a backup" in logged
        assert "waits for workers" in info(running, "sound")["reason"]
        with running.client() as client:
            found = client.get("/v1/status").json()["findings"]
        assert [(each["about"], each["run"]) for each in found] == [("files", "finished"), ("files", "lost")]


def test_a_run_without_an_intact_checkpoint_is_a_finding(shared: InThread, run: str) -> None:
    """Its state may be with aggregators, which write no other checkpoint before one is due."""
    crew(shared, run, ["a"])
    verified(shared, run).outer.mark_damaged(0, "fragment 0 of checkpoint 0 is missing")
    with shared.client() as client:
        (found,) = [each for each in client.get("/v1/status").json()["findings"] if each["run"] == run]
    assert found["about"] == "files"
    assert "no intact checkpoint is left" in found["message"]
    assert f"outerstep run rm {run}" in found["remedy"]
