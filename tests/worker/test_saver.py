"""When snapshots are written, and which outer state they belong to."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.states import LAYOUT, empty_state
from worker.accounts.stages import Stages
from worker.state import snapshot
from worker.state.outer_state import OuterState
from worker.state.saver import Saver
from worker.state.snapshot import Snapshot
from worker.state.state_dir import StateDir
from worker.state.work import Contribution, Work


def to_round(state: OuterState, number: int) -> None:
    for p, n in enumerate(LAYOUT.elements):
        state.set(p, torch.full((n,), float(number)), None)
    state.reach(number)


def work_of(number: int) -> Work:
    deltas = enumerate(torch.zeros(n) for n in LAYOUT.elements)
    return Work(number, [Contribution(number, p, [[0, 1]], 1, 1, 0.5, 0.0, delta) for p, delta in deltas])


@contextmanager
def saver_of(path: Path, state: OuterState) -> Iterator[Saver]:
    with StateDir(path) as files, Saver(files, "me", state, Stages(lambda: 0.0)) as saver:
        yield saver


def save(saver: Saver, number: int) -> None:
    written = saver.save(work_of(number), partial=False, optimizers=list, scaler=lambda: None, warmup_left=0)
    assert written is not None
    written.result()


def found(path: Path) -> tuple[Snapshot | None, OuterState]:
    """What a process that begins now would find."""
    state = empty_state()
    with saver_of(path, state) as saver:
        return saver.load(), state


def test_the_last_work_keeps_its_state_until_other_work_is_durable(tmp_path: Path) -> None:
    state = empty_state()
    with saver_of(tmp_path / "state", state) as saver:
        to_round(state, 0)
        saver.save_state()
        save(saver, 0)
        for number in (1, 2, 3):  # states that were recovered, and no work done on them
            to_round(state, number)
            saver.save_state()
    loaded, then = found(tmp_path / "state")
    assert loaded is not None
    assert (loaded.work.round, then.round, float(then.theta[0][0])) == (0, 0, 0.0)
    with saver_of(tmp_path / "state", state) as saver:
        assert saver.load() is not None
        to_round(state, 3)
        save(saver, 3)
    loaded, then = found(tmp_path / "state")
    assert loaded is not None
    assert (loaded.work.round, then.round, float(then.theta[0][0])) == (3, 3, 3.0)


def test_a_state_is_written_once_and_does_not_change_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, states = threading.Event(), threading.Event(), []
    save_state = snapshot.save_state

    def slow(files: StateDir, owner: str, slot: int, state: OuterState) -> None:
        begun.set()
        assert go_on.wait(30)
        states.append(float(state.theta[0][0]))
        save_state(files, owner, slot, state)

    monkeypatch.setattr(snapshot, "save_state", slow)
    state = empty_state()
    with saver_of(tmp_path / "state", state) as saver:
        to_round(state, 0)
        saver.save_state()
        saver.save_state()
        assert begun.wait(30)
        stepping = threading.Thread(target=to_round, args=(state, 1))
        stepping.start()
        go_on.set()
        stepping.join()
        save(saver, 1)
    assert states == [0.0, 1.0]


def test_work_is_not_saved_without_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = empty_state()
    with saver_of(tmp_path / "state", state) as saver:
        to_round(state, 0)
        save(saver, 0)

        def fail(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(snapshot, "save_state", fail)
        to_round(state, 1)
        with pytest.raises(OSError, match="disk full"):
            save(saver, 1)
    loaded, then = found(tmp_path / "state")
    assert loaded is not None
    assert (loaded.work.round, then.round) == (0, 0)


def test_without_a_directory_nothing_is_saved() -> None:
    def optimizers() -> list[dict[str, object]]:
        raise AssertionError("their state is a copy, and nobody needs it")

    state = empty_state()
    with Saver(None, "me", state, Stages(lambda: 0.0)) as saver:
        to_round(state, 0)
        saver.save_state()
        assert saver.save(work_of(0), partial=False, optimizers=optimizers, scaler=lambda: None, warmup_left=0) is None
        assert saver.load() is None
