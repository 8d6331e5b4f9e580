"""The coordinator stops and starts again on the same directory, sometimes with a part of it missing or damaged.

The state in which a crash would have left the directory is made by hand, between the two lives: a stop is a crash whose
last transaction was finished.
"""

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from coordinator.server import make_server
from coordinator.settings import Settings
from coordinator.store.data_directory import StateFiles
from coordinator.store.database import Database
from coordinator.store.tables import RunRow
from coordinator.sync import outer_state
from harness import stores
from harness.coordinator import InThread, SettableClock, coordinator_thread
from harness.member import Member, spec_toml
from harness.stores import names
from protocol.errors import OuterstepError
from tests.coordinator.crew import (
    crew,
    events,
    info,
    play_one_round_of_two,
    play_one_round_of_two_without_deltas,
    play_round,
    play_rounds,
    problem,
    ready,
    set_state,
)
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow


class Lives:
    """One data directory and one address, served again and again."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.port = 0

    @contextmanager
    def life(self, **settings: Any) -> Iterator[InThread]:
        with coordinator_thread(self.data_dir, self.port, **settings) as running:
            self.port = int(running.url.rsplit(":", 1)[1])
            yield running

    @property
    def states(self) -> StateFiles:
        return StateFiles(self.data_dir / "runs" / "r" / "state")

    @contextmanager
    def database(self) -> Iterator[Database]:
        """The database while no coordinator lives."""
        database = Database(stores.database_of(self.data_dir))
        yield database
        database.close()


@pytest.fixture
def lives(tmp_path: Path) -> Lives:
    return Lives(tmp_path / "data")


def two_of_whom_a_has_contributed(running: InThread) -> list[Member]:
    a, b = crew(running, "r", ["a", "b"], rounds=1, min_workers=2)
    ready([a, b], 0)
    a.take_part(0)
    return [a, b]


def checkpoint(running: InThread, round_: int | str) -> list[str]:
    """The digests of a checkpoint of run r."""
    return [each["state_digest"] for each in info(running, "r", f"/checkpoints/{round_}")["fragments"]]


@pytest.mark.covers("reliability:coordinator-restart")
def test_an_open_round_goes_on_with_what_was_acknowledged(lives: Lives) -> None:
    with lives.life() as running:
        a, b = two_of_whom_a_has_contributed(running)
        units = b.assignment(0).units
    with lives.life() as running:
        assert info(running, "r", "/rounds/current")["fragments"][0]["contributors"] == ["a"]
        assert b.take_part(0).units == units
        for member in (a, b):
            member.step(0)
        running.await_state("r", 1)
        assert checkpoint(running, 1) == [a.base(p).hex() for p in (0, 1)] == [b.base(p).hex() for p in (0, 1)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The deltas of the round that the tests below disturb."""
    with coordinator_thread(tmp_path_factory.mktemp("undisturbed") / "data") as running:
        a, _ = play_one_round_of_two(running)
        return [a.delta(0, p).content for p in (0, 1)]


def test_a_fault_of_the_disk_is_recorded_and_the_aggregation_tried_again_until_it_succeeds(
    tmp_path: Path, undisturbed: list[bytes]
) -> None:
    clock = SettableClock()
    with coordinator_thread(tmp_path / "data", clock=clock) as running:
        a, _, blocked = play_one_round_of_two_without_deltas(running)
        wait_until(lambda: len(events(running, "r", "fault")) == 2)
        assert "could not be published" in events(running, "r", "fault")[0]["message"]
        problem(a.delta(0, 0, wait_s=0), "not-published")
        blocked.unblock()
        clock.advance(5)
        running.coordinator.tick()
        assert [a.delta(0, p).content for p in (0, 1)] == undisturbed


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [pytest.param(Path.unlink, id="missing"), pytest.param(flip, id="one bit flipped")],
)
def test_the_outer_state_is_derived_again_from_checkpoint_and_deltas(
    lives: Lives, damage: Callable[[Path], None]
) -> None:
    with lives.life() as running:
        (member,) = crew(running, "r", ["w"], rounds=4)
        play_rounds(running, [member], range(2))
    damage(lives.states.path(1, 2))
    with lives.life() as running:
        assert [event["message"] for event in events(running, "r", "rederived")] == [
            "fragment 1 of the outer state is rebuilt from checkpoint 0"
        ]
        assert running.live("r").outer.states == [(2, member.base(0)), (2, member.base(1))]
        play_rounds(running, [member], range(2, 4))
        assert checkpoint(running, 4) == [member.base(p).hex() for p in (0, 1)]


def test_a_start_on_a_full_disk_is_refused_and_is_no_damage(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by simulation seed 80111: the run waited for ever for files that nobody had to restore."""

    def no_room(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, "no room")

    with lives.life() as running:
        (member,) = crew(running, "r", ["w"])
        play_rounds(running, [member], range(1))
        (running.data_dir / "runs" / "r" / "state" / "0.1").unlink()
        with monkeypatch.context() as patch:
            patch.setattr(outer_state, "write_state", no_room)
            with pytest.raises(OSError, match="no room"):
                outer_state.restore(running.live("r"))
        outer_state.restore(running.live("r"))
        play_round([member], 1)


def test_uploads_that_were_never_acknowledged_are_swept_and_acknowledged_ones_stay(lives: Lives) -> None:
    with lives.life() as running:
        _, b = two_of_whom_a_has_contributed(running)
        live = running.live("r")
        acknowledged = names(live, "contributions")
        assert len(acknowledged) == 2
        checkpoints = names(live, "checkpoints")
        for name in (
            live.names.contribution(0, 0, "b", bytes(32)),
            live.names.delta(0, 0, bytes(32)),
            live.names.checkpoint(0, 1, bytes(32)),
        ):
            live.blobs.put(name, b"durable, but its row never came")
    (lives.data_dir / "incoming" / "17").write_bytes(b"half an upl")
    with lives.life() as running:
        live = running.live("r")
        kept = [names(live, kind) for kind in ("contributions", "deltas", "checkpoints")]
        assert kept == [acknowledged, [], checkpoints]
        assert list((lives.data_dir / "incoming").iterdir()) == []
        b.take_part(0)
        assert b.delta(0, 0).status_code == 200


def test_a_run_keeps_the_defaults_of_the_version_that_created_it(lives: Lives) -> None:
    with lives.life() as running:
        running.create_run(spec_toml("r"))
        spec = info(running, "r")["spec"]
    older = spec | {"outer": {"learning_rate": 0.7, "momentum": 0.9}}
    assert older != spec
    with lives.database() as database, database.write() as session:
        session.scalars(select(RunRow)).one().spec = older
    with lives.life() as running:
        assert info(running, "r")["spec"] == older
        running.create_run(spec_toml("r"))  # of which each says what it has always said: it is the same run
        assert info(running, "r")["spec"] == older


def everything(running: InThread) -> list[Any]:
    shown = [("r", ""), ("another", ""), ("r", "/rounds"), ("r", "/workers")]
    return [info(running, run, path) for run, path in shown]


def test_all_runs_tokens_and_history_are_there_again(lives: Lives) -> None:
    with lives.life() as running:
        (member,) = crew(running, "r", ["w"], rounds=2)
        play_rounds(running, [member], range(1))
        running.create_run(spec_toml("another"))
        set_state(running, "another", "paused")
        running.coordinator.tick()  # a round that has just opened tells so until the first tick
        before = everything(running)
    with lives.life() as running:
        after = everything(running)
        for whole in (before[0], before[1], after[0], after[1]):
            whole["disk_bytes"].pop("state")  # derived, and of the newest state alone after a start
            whole.pop("eta_s")  # which passes
        for old, new in zip(before[3]["items"], after[3]["items"], strict=True):
            assert old.pop("last_seen_s") >= 0
            assert new.pop("last_seen_s") >= 0
        assert after == before
        play_round([member], 1)


@pytest.mark.in_sqlite
def test_a_stored_run_with_a_setting_of_another_version_is_refused_by_name(lives: Lives) -> None:
    with lives.life() as running:
        running.create_run(spec_toml("r", rounds=1))
    with lives.database() as database, database.write() as session:
        row = session.scalars(select(RunRow)).one()
        row.spec = {**row.spec, "privacy": None, "sync": {**row.spec["sync"], "aggregation": "median"}}
    said = "the run r .*sync.aggregation = 'median'.*; privacy: unknown key"
    with pytest.raises(OuterstepError, match=said):
        make_server(Settings(data_dir=lives.data_dir, port=0))


def test_a_second_coordinator_on_the_same_directory_is_refused_and_the_first_is_not_harmed(lives: Lives) -> None:
    with lives.life() as running:
        with pytest.raises(
            OuterstepError, match="is in use by another coordinator; stop it or choose another --data-dir"
        ):
            make_server(Settings(data_dir=lives.data_dir, port=0))
        (member,) = crew(running, "r", ["w"], rounds=1)
        play_round([member], 0)


@pytest.mark.usefixtures("endless_polls")
def test_stopping_answers_those_who_wait(lives: Lives) -> None:
    with lives.life() as running:
        (member,) = crew(running, "r", ["w"], min_workers=2)
        answers: list[str] = []
        poll = threading.Thread(target=lambda: answers.append(member.assignment(0, wait_s=9999).action))
        poll.start()
        wait_until(lambda: "w" in running.live("r").members.ready)  # the poll has looked once, and waits
    poll.join(PATIENCE_S)
    assert answers == ["wait"]
