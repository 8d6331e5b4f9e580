"""When snapshots are written, and which outer state they belong to."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.states import LAYOUT, empty_state
from tests.support.waiting import PATIENCE_S
from worker.accounts.stages import Stages
from worker.state import snapshot
from worker.state.outer_state import OuterState
from worker.state.saver import Saver
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


@pytest.fixture(params=[False, True], ids=["in memory", "in files"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], OuterState]:
    """Makes an outer state with nothing in it."""

    def made() -> OuterState:
        (tmp_path / "state").mkdir(exist_ok=True)
        return empty_state(tmp_path / "state" if request.param else None)

    return made


def found(path: Path, state: OuterState) -> tuple[int, int | None, float] | None:
    """What a process that begins now would find: the round of its work, and that and a parameter of its state."""
    with saver_of(path, state) as saver:
        loaded = saver.load()
    return None if loaded is None else (loaded.work.round, state.round, float(state.theta[0][0]))


def test_the_last_work_keeps_its_state_until_other_work_is_durable(
    tmp_path: Path, make: Callable[[], OuterState]
) -> None:
    state = make()
    with saver_of(tmp_path / "state", state) as saver:
        to_round(state, 0)
        saver.save_state()
        save(saver, 0)
        for number in (1, 2, 3):  # states that were recovered, and no work done on them
            to_round(state, number)
            saver.save_state()
    assert found(tmp_path / "state", make()) == (0, 0, 0.0)
    state = make()
    with saver_of(tmp_path / "state", state) as saver:
        assert saver.load() is not None
        to_round(state, 3)
        save(saver, 3)
    assert found(tmp_path / "state", make()) == (3, 3, 3.0)


def test_a_state_is_written_once_and_does_not_change_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], OuterState]
) -> None:
    begun, go_on, states = threading.Event(), threading.Event(), []
    save_state = snapshot.save_state

    def slow(files: StateDir, owner: str, slot: int, state: OuterState) -> None:
        begun.set()
        assert go_on.wait(PATIENCE_S)
        states.append(float(state.theta[0][0]))
        save_state(files, owner, slot, state)

    monkeypatch.setattr(snapshot, "save_state", slow)
    state = make()
    with saver_of(tmp_path / "state", state) as saver:
        to_round(state, 0)
        saver.save_state()
        saver.save_state()
        assert begun.wait(PATIENCE_S)
        stepping = threading.Thread(target=to_round, args=(state, 1))
        stepping.start()
        go_on.set()
        stepping.join()
        save(saver, 1)
    assert states == [0.0, 1.0]


def test_work_is_not_saved_without_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], OuterState]
) -> None:
    state = make()
    with saver_of(tmp_path / "state", state) as saver:
        to_round(state, 0)
        save(saver, 0)

        def fail(*_: object) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(snapshot, "save_state", fail)
        to_round(state, 1)
        with pytest.raises(OSError, match="disk full"):
            save(saver, 1)
    assert found(tmp_path / "state", make()) == (0, 0, 0.0)


def test_a_state_in_files_is_not_copied(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    state = empty_state(folder)
    with saver_of(folder, state) as saver:
        for number in range(3):
            to_round(state, number)
            save(saver, number)
        assert sorted(path.name for path in folder.iterdir()) == [
            "lock", "snapshot.pt", "state-0-of-1.bin", "state-1-of-1.bin", "state-2-of-1.bin",
        ]  # fmt: skip


def copied(folder: Path) -> Path:
    shutil.rmtree(folder.parent / "copy", ignore_errors=True)
    return Path(shutil.copytree(folder, folder.parent / "copy"))


@pytest.mark.parametrize("in_files", [False, True])
def test_a_worker_with_other_settings_continues_and_leaves_no_file_behind(tmp_path: Path, *, in_files: bool) -> None:
    """Restarted with or without --offload, for example. It may do more work on the same state first, if the coordinator
    gave the units of the saved work to others."""
    folder = tmp_path / "state"
    folder.mkdir()
    before = empty_state(None if in_files else folder)
    with saver_of(folder, before) as saver:
        for number in range(2):
            to_round(before, number)
            save(saver, number)
    after = empty_state(folder if in_files else None)
    with saver_of(folder, after) as saver:
        loaded = saver.load()
        assert loaded is not None
        assert (loaded.work.round, after.digest()) == (1, before.digest())
        save(saver, 1)
        assert found(copied(folder), empty_state(tmp_path / "copy" if in_files else None)) == (1, 1, 1.0)
        to_round(after, 2)
        save(saver, 2)
        assert found(copied(folder), empty_state(tmp_path / "copy" if in_files else None)) == (2, 2, 2.0)
    left = {path.suffix for path in folder.glob("state-*")}
    assert left == ({".bin"} if in_files else {".pt"})


def test_without_a_directory_nothing_is_saved() -> None:
    def optimizers() -> list[dict[str, object]]:
        raise AssertionError("their state is a copy, and nobody needs it")

    state = empty_state()
    with Saver(None, "me", state, Stages(lambda: 0.0)) as saver:
        to_round(state, 0)
        saver.save_state()
        assert saver.save(work_of(0), partial=False, optimizers=optimizers, scaler=lambda: None, warmup_left=0) is None
        assert saver.load() is None
