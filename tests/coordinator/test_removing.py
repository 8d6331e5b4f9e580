"""Runs that are removed: what is left of them, when they may be, and a crash at each step of it."""

from pathlib import Path

import pytest
from sqlalchemy import func, select

from coordinator.service import Coordinator
from coordinator.settings import Settings
from coordinator.store.tables import Base
from coordinator.upkeep import removing
from harness.coordinator import InThread, coordinator_thread
from harness.member import Member, spec_toml
from tests.coordinator.crew import crew, enlist, info, play_rounds, problem, set_state
from tests.support.waiting import wait_until


def finished(running: InThread, run: str) -> Member:
    """The only member of a run of two rounds that is over."""
    (member,) = crew(running, run, ["w"])
    play_rounds(running, [member], range(2))
    return member


def leave(member: Member) -> None:
    assert member.http.delete(member.path()).status_code == 204


def remove(running: InThread, run: str) -> None:
    """As an operator does, again while its files are worked on."""
    with running.client() as admin:
        wait_until(lambda: admin.delete(f"/v1/runs/{run}").status_code == 204)


def rows(running: InThread, run_id: int) -> int:
    """Rows of any table that are of the run."""
    with running.coordinator.database.read() as session:
        return sum(
            session.scalar(select(func.count()).select_from(table).where(table.columns["run_id"] == run_id)) or 0
            for table in Base.metadata.sorted_tables
            if "run_id" in table.columns
        )


def blobs(running: InThread, run: str) -> list[str]:
    """But for the outer state, which is derived from them."""
    listed = running.coordinator.runs()[0].blobs.list(f"runs/{run}/")
    return [name for name, _ in listed if "/state/" not in name]


@pytest.mark.slow
def test_nothing_is_left_of_a_run_and_its_name_is_free(shared: InThread, run: str) -> None:
    leave(finished(shared, f"{run}-other"))
    leave(finished(shared, run))
    live, kept = shared.live(run), blobs(shared, f"{run}-other")
    assert rows(shared, live.id) > 10
    remove(shared, run)
    assert rows(shared, live.id) == 0
    assert blobs(shared, run) == []
    assert [path for path in (shared.data_dir / "runs" / run).rglob("*") if path.is_file()] == []
    with shared.client() as admin:
        problem(admin.get(f"/v1/runs/{run}"), "not-found")
        problem(admin.delete(f"/v1/runs/{run}"), "not-found")
    assert info(shared, f"{run}-other")["state"] == "finished"
    assert blobs(shared, f"{run}-other") == kept
    leave(finished(shared, run))
    assert shared.live(run).id > live.id, "whoever still has the removed run must not see the new one's rows"


def test_a_run_that_goes_on_is_not_removed(shared: InThread, run: str) -> None:
    (member,) = crew(shared, run, ["w"])
    with shared.client() as admin:
        assert "stop it first" in problem(admin.delete(f"/v1/runs/{run}"), "run-not-ended")["detail"]
        set_state(shared, run, "stopped")
        document = problem(admin.delete(f"/v1/runs/{run}"), "not-ready")
        assert document["detail"] == f"workers are still leaving the run {run}: w"
    leave(member)
    remove(shared, run)


@pytest.mark.slow
def test_a_run_that_another_is_to_start_from_is_not_removed(shared: InThread, run: str) -> None:
    leave(finished(shared, run))
    shared.create_run(spec_toml(f"{run}-next").replace('preset = "tiny"', f'preset = "tiny"\nrun = "{run}"'))
    with shared.client() as admin:
        assert f"{run}-next" in problem(admin.delete(f"/v1/runs/{run}"), "run-not-ended")["detail"]
    set_state(shared, f"{run}-next", "stopped")
    remove(shared, run)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the rows", "before the blobs", "before the mark"])
def test_a_crash_leaves_the_whole_run_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    with coordinator_thread(tmp_path / "data") as running:
        leave(finished(running, "r"))
        live = running.live("r")
        wait_until(lambda: not any(job.running for job in live.outer.jobs))
        before = blobs(running, "r")
        if moment == "before the rows":
            live.blobs.put(live.names.removed, b"")
        else:
            monkeypatch.setattr(removing, "remove_blobs", lambda *_: None)
            remove(running, "r")
            monkeypatch.undo()
        if moment == "before the mark":
            for name in before:
                live.blobs.delete(name)
    with coordinator_thread(tmp_path / "data") as running:
        if moment == "before the rows":
            assert info(running, "r")["state"] == "finished"
            assert blobs(running, "r") == before
            return
        with running.client() as admin:
            problem(admin.get("/v1/runs/r"), "not-found")
        running.create_run(spec_toml("r"))
        assert blobs(running, "r") == []
        leave(enlist(running, "r", "w"))


@pytest.mark.in_sqlite
def test_blobs_of_a_run_that_an_older_database_lacks_are_kept(tmp_path: Path) -> None:
    """A database restored from a backup may be older than the run: without a mark nothing of it is removed."""
    file = tmp_path / "data" / "runs" / "newer" / "checkpoints" / "3" / "0.0123456789abcdef"
    with coordinator_thread(tmp_path / "data"):
        pass
    file.parent.mkdir(parents=True)
    file.write_bytes(b"a checkpoint")
    Coordinator(Settings(data_dir=tmp_path / "data")).close()
    assert file.read_bytes() == b"a checkpoint"
