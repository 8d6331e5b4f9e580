"""The state directory and the snapshot in it."""

import re
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch

from tests.support.states import LAYOUT, empty_state
from worker.errors import StateDirBusy
from worker.state import snapshot
from worker.state.fragments import host_copy
from worker.state.optimizer_state import with_each_tensor
from worker.state.outer_state import OuterState
from worker.state.snapshot import Snapshot
from worker.state.state_dir import SNAPSHOT, STATE, STATE_FILE, MemberTokens, StateDir
from worker.state.work import Carry, Contribution, Late, RoundStart, Work


def make_state(folder: Path | None = None) -> OuterState:
    state = empty_state(folder)
    for p, n in enumerate(LAYOUT.elements):
        state.set(p, torch.randn(n), torch.randn(n))
    return state


def take(state: OuterState) -> Snapshot:
    parameter = torch.nn.Parameter(torch.randn(5))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.randn(5)
    optimizer.step()
    late = Late(torch.randn(LAYOUT.elements[1]), 0.5, [5, 6])
    on_time, partly_late = (torch.randn(n) for n in LAYOUT.elements)
    work = Work(
        7,
        [
            Contribution(7, 0, [[3, 9]], 4, 6, 0.25, 0.1, on_time),
            Contribution(7, 1, [[3, 9]], 4, 6, 0.25, 0.2, partly_late, late),
        ],
    )
    return Snapshot(work, False, [optimizer.state_dict()], None, 3, 0, state.digests)


def save(files: StateDir, owner: str, state: OuterState, taken: Snapshot | None = None) -> None:
    taken = taken or take(state)
    snapshot.save_state(files, owner, taken.slot, state)
    snapshot.save(files, owner, taken)


def load(files: StateDir, owner: str = "me") -> tuple[Snapshot | None, OuterState]:
    state = empty_state()
    return snapshot.load(files, owner, state), state


@pytest.fixture
def files(tmp_path: Path):
    with StateDir(tmp_path / "state") as directory:
        yield directory


def test_round_trip(files: StateDir) -> None:
    state = make_state()
    taken = take(state)
    save(files, "me", state, taken)
    loaded, fresh = load(files)
    assert loaded is not None
    assert isinstance(loaded.work, Work)
    assert isinstance(taken.work, Work)
    assert loaded.work.round == 7
    assert (loaded.partial, loaded.warmup_left) == (False, 3)
    for ours, theirs in zip(loaded.work.contributions, taken.work.contributions, strict=True):
        assert torch.equal(ours.pseudo_gradient, theirs.pseudo_gradient)
        assert replace(ours, pseudo_gradient=theirs.pseudo_gradient, late=theirs.late) == theirs
    late, expected = loaded.work.contributions[1].late, taken.work.contributions[1].late
    assert loaded.work.contributions[0].late is None
    assert late is not None
    assert expected is not None
    assert torch.equal(late.lacking, expected.lacking)
    assert (late.share, late.rounds) == (0.5, [5, 6])
    assert len(loaded.inner_optimizers) == 1
    moment = loaded.inner_optimizers[0]["state"][0]["exp_avg"]
    assert torch.equal(moment, taken.inner_optimizers[0]["state"][0]["exp_avg"])
    assert (fresh.round, fresh.digest()) == (7, state.digest())


def test_round_trip_while_fragments_travel(files: StateDir) -> None:
    elements = LAYOUT.elements
    late, unsent, ahead = (torch.randn(n) for n in (elements[1], elements[0], elements[0]))
    carry = Carry({1: Late(late, 0.5, [5, 6])}, [[3, 9]], 4, 0, 0.25, {0: unsent}, {0: ahead}, {0: 2, 1: 5})
    start = RoundStart(7, [torch.randn(n) for n in elements], carry)
    state = make_state()
    save(files, "me", state, replace(take(state), work=start))
    loaded, _ = load(files)
    assert loaded is not None
    assert isinstance(loaded.work, RoundStart)
    assert (loaded.work.round, loaded.work.carry.fresh) == (7, {0: 2, 1: 5})
    assert all(torch.equal(a, b) for a, b in zip(loaded.work.local, start.local, strict=True))
    found = loaded.work.carry
    assert (found.units, found.weight, found.loss, found.late[1].rounds) == ([[3, 9]], 4, 0.25, [5, 6])
    for p in range(2):
        before, after = carry.part(p), found.part(p)
        assert before is not None
        assert after is not None
        assert torch.equal(before, after)


def test_writing_leaves_the_options_of_torch_alone(files: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the whole process's: a script of the user's may save a model of its own on another thread."""

    def refuse(*_: object) -> None:
        raise AssertionError("an option of torch was touched")

    for name in [name for name in dir(torch.serialization) if name.startswith("set_")]:
        monkeypatch.setattr(torch.serialization, name, refuse)
    save(files, "me", make_state())
    assert load(files)[0] is not None


def test_a_copy_does_not_follow_the_training() -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(5)
    optimizer.step()
    taken = with_each_tensor(optimizer.state_dict(), host_copy)
    before = taken["state"][0]["exp_avg"].clone()
    optimizer.step()
    assert torch.equal(taken["state"][0]["exp_avg"], before)
    assert not torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before)
    assert taken["param_groups"] == optimizer.state_dict()["param_groups"]


def test_a_foreign_one_is_ignored_and_says_so(files: StateDir, caplog: pytest.LogCaptureFixture) -> None:
    save(files, "somebody", make_state())
    assert load(files)[0] is None
    assert "belongs to another run" in caplog.text


@pytest.mark.slow
@pytest.mark.covers("reliability:damaged-snapshot")
@pytest.mark.parametrize(
    ("name", "shared"),
    [(SNAPSHOT, False), (STATE.format(0), False), (SNAPSHOT, True), (STATE_FILE.format(0, 1), True)],
)
def test_damage_is_noticed_wherever_it_is_and_said_once(
    files: StateDir, caplog: pytest.LogCaptureFixture, name: str, shared: bool
) -> None:
    """Bytes that changed on the disk never pass for what was saved, a cut file neither, and nothing is raised. `shared`:
    the snapshot shares the files of its state."""
    state = make_state(files.path if shared else None)
    if shared:
        assert state.keep(1) == 0
    save(files, "me", state, replace(take(state), shared=shared))
    path = files.path / name
    whole = path.read_bytes()
    used = [*range(0, len(whole), 101)]
    if name == STATE_FILE.format(0, 1):
        sizes = [4 * n for n in LAYOUT.elements for _ in range(2)]
        used = [len(whole) // 4 * index + at for index, size in enumerate(sizes) for at in range(0, size, 101)]
    flipped = (whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :] for at in used)
    cut = (whole[:length] for length in range(0, len(whole), max(len(whole) // 50, 1)))
    for content in chain(flipped, cut):
        path.write_bytes(content)
        caplog.clear()
        assert load(files)[0] is None
        assert [message.split(" (")[0] for message in caplog.messages] == [f"{path} is damaged"]
    path.write_bytes(whole)
    caplog.clear()
    assert load(files)[0] is not None
    assert not caplog.messages
    path.unlink()
    assert load(files)[0] is None


def test_work_without_the_state_it_was_done_on_is_ignored(files: StateDir, caplog: pytest.LogCaptureFixture) -> None:
    save(files, "me", make_state())
    snapshot.save_state(files, "me", 0, make_state())  # another one
    assert load(files)[0] is None
    (files.path / STATE.format(0)).unlink()
    assert load(files)[0] is None
    another, missing = caplog.messages
    assert "not the outer state that the snapshot belongs to" in another
    assert "No such file" in missing


@pytest.mark.covers("security:code-in-weights")
def test_unpickling_runs_no_code(files: StateDir, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "boom",))

    document = {"version": 1, "identity": "me", "theta": Bomb()}
    files.replace(SNAPSHOT, partial(snapshot.write_document, document))
    assert load(files)[0] is None
    assert not (tmp_path / "boom").exists()


def test_a_failed_write_leaves_the_old_file(files: StateDir) -> None:
    save(files, "me", make_state())
    before = (files.path / SNAPSHOT).read_bytes()

    def fail(file: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.replace(SNAPSHOT, fail)
    assert (files.path / SNAPSHOT).read_bytes() == before


def test_one_process_per_directory(files: StateDir) -> None:
    with pytest.raises(StateDirBusy, match="already uses"), StateDir(files.path):
        pass
    program = (
        "import sys; from pathlib import Path; from worker.state.state_dir import StateDir; "
        "StateDir(Path(sys.argv[1])).__enter__()"
    )
    done = subprocess.run([sys.executable, "-c", program, files.path], check=False, capture_output=True, text=True)
    assert re.search(r"StateDirBusy: another process uses .*another name \(--name\)", done.stderr)


@pytest.mark.covers("security:local-users")
def test_the_member_token_is_private(files: StateDir) -> None:
    assert files.member_tokens() == MemberTokens(None, None)
    files.save_member_tokens(MemberTokens("secret", "next"))
    assert files.member_tokens() == MemberTokens("secret", "next")
    assert stat.S_IMODE((files.path / "member.json").stat().st_mode) == 0o600


def test_a_child_that_outlives_a_killed_worker_does_not_keep_it_from_continuing(tmp_path: Path) -> None:
    """Processes of a DataLoader notice only after seconds that the script was killed, and they were forked with its lock."""
    program = """
import os, sys
from worker.state.state_dir import StateDir
with StateDir(sys.argv[1]):
    child = os.fork()
    if child == 0:
        print("forked", flush=True)
        sys.stdin.read()
        os._exit(0)
    os.waitpid(child, 0)
"""
    worker = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with worker:  # closes the child's standard input at its end
        assert worker.stdout is not None
        assert worker.stdout.readline() == "forked\n"
        with pytest.raises(StateDirBusy, match="end it"), StateDir(tmp_path):
            pass
        worker.kill()
        assert worker.wait() == -signal.SIGKILL
        with StateDir(tmp_path):
            pass
