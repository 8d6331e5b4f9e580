"""The outer states that an aggregator keeps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from coordinator.aggregation.states import StateLost, States
from coordinator.aggregation.tasks import Advance, Advanced, Origin, StateRef
from coordinator.store.payloads import MemoryBudget
from harness import stores
from harness.coordinator import InThread, coordinator_thread
from harness.stores import MemoryBlobs
from protocol.spec.sections import OuterSpec
from tests.coordinator.crew import crew, play_rounds

pytestmark = pytest.mark.slow


@dataclass
class Line:
    """A run's checkpoints and deltas of fragment 0 in a store, and its states."""

    blobs: MemoryBlobs
    states: list[StateRef]
    checkpoints: dict[int, bytes]
    deltas: list[bytes]
    elements: int

    def note(self, running: InThread) -> None:
        """Note the run's newest state, delta and checkpoints."""
        with running.coordinator.database.read() as session:
            row = session.execute(text("SELECT round, state_digest FROM outer_states WHERE fragment = 0")).one()
            self.states.append(StateRef(round=row.round, digest=bytes(row.state_digest)))
            found = session.execute(text("SELECT round, digest FROM checkpoint_fragments WHERE fragment = 0"))
            self.checkpoints.update({each.round: bytes(each.digest) for each in found})
            query = text("SELECT delta_digest FROM fragments WHERE fragment = 0 AND round = :r")
            if row.round:
                self.deltas.append(bytes(session.execute(query, {"r": row.round - 1}).scalar_one()))

    def task(self, to: int, since: int = 0, known: int | None = None, *, checkpoint: bool = False) -> Advance:
        origin = Origin(
            checkpoint=self.states[since], blob=self.checkpoints[since], deltas=tuple(self.deltas[since:to])
        )
        return Advance(
            run="r",
            fragment=0,
            elements=self.elements,
            outer=OuterSpec(),
            origin=origin,
            known=self.states[to - 1 if known is None else known],
            checkpoint=checkpoint,
        )


def line_of(folder: Path, names: list[str]) -> Line:
    """A finished run of three rounds, with checkpoints 0, 2 and 3: nothing is deleted from its store."""
    blobs = MemoryBlobs()
    kept = stores.Disturbed(blobs, "", stores.nothing, stores.nothing)
    kept.delete = lambda *_: None  # type: ignore[method-assign]
    found = Line(blobs, [], {}, [], 0)
    with coordinator_thread(folder / "data", store=lambda _: kept) as running:
        members = crew(running, "r", names, rounds=3, min_workers=len(names), checkpoints="every_rounds = 2")
        model = running.live("r").model
        assert model is not None
        found.elements = model.layout.elements[0]
        found.note(running)
        for round_ in range(3):
            play_rounds(running, members, [round_])
            found.note(running)
    return found


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    return line_of(tmp_path_factory.mktemp("line"), ["a", "b", "c"])


def advance(states: States, line: Line, task: Advance, blobs: Any = None) -> Advanced:
    return states.advance(task, blobs or line.blobs, MemoryBudget())


class Counted(stores.Disturbed):
    """Blobs that remember what is read."""

    def __init__(self, blobs: MemoryBlobs) -> None:
        super().__init__(blobs, "", stores.nothing, stores.nothing)
        self.read: list[str] = []

    def open(self, name: str, *, fresh: bool = False) -> Any:
        self.read.append(name.split("/", 2)[2].rsplit(".", 1)[0])
        return super().open(name, fresh=fresh)

    def fetch(self, name: str, target: Path) -> None:
        self.read.append(name.split("/", 2)[2].rsplit(".", 1)[0])
        super().fetch(name, target)


def test_a_state_is_derived_once_and_then_stepped(line: Line, tmp_path: Path) -> None:
    blobs, states = Counted(line.blobs), States(tmp_path, 1 << 30)
    for to in (1, 2, 3):
        found = advance(states, line, line.task(to), blobs)
        assert found.digest == line.states[to].digest
        assert 0 < found.largest < 2
    assert blobs.read == ["checkpoints/0/0", "deltas/0/0", "deltas/1/0", "deltas/2/0"]
    again = advance(states, line, line.task(3, known=3, checkpoint=True), blobs)
    assert (again.digest, again.checkpoint and again.checkpoint.digest) == (line.states[3].digest, line.checkpoints[3])
    assert len(blobs.read) == 4


def test_a_state_that_others_have_stepped_meanwhile_catches_up(line: Line, tmp_path: Path) -> None:
    blobs, states = Counted(line.blobs), States(tmp_path, 1 << 30)
    advance(states, line, line.task(1), blobs)
    assert advance(states, line, line.task(3), blobs).digest == line.states[3].digest
    assert blobs.read == ["checkpoints/0/0", "deltas/0/0", "deltas/1/0", "deltas/2/0"]
    assert advance(States(tmp_path / "b", 1 << 30), line, line.task(3, since=2), blobs).digest == line.states[3].digest
    assert blobs.read[4:] == ["checkpoints/2/0", "deltas/2/0"]


def test_a_state_from_before_a_rollback_is_derived_again(line: Line, tmp_path: Path) -> None:
    """The run has other states with the same numbers now."""
    other = line_of(tmp_path / "other", ["d", "e", "f"])
    assert other.states[1] != line.states[1]
    for known in (1, 2, 3):
        states = States(tmp_path / str(known), 1 << 30)
        advance(states, other, other.task(1))
        assert advance(states, line, line.task(3, known=known)).digest == line.states[3].digest


def test_a_state_that_was_done_again_is_derived_again(line: Line, tmp_path: Path) -> None:
    """The state that is wanted has the number of one that is kept."""
    other, states = line_of(tmp_path / "other", ["d", "e", "f"]), States(tmp_path / "states", 1 << 30)
    advance(states, other, other.task(1))
    assert advance(states, line, line.task(1)).digest == line.states[1].digest


@pytest.mark.parametrize("kind", ["checkpoints/0", "deltas/1"])
@pytest.mark.parametrize("how", ["spoilt", "missing"])
def test_a_state_that_cannot_be_derived_is_given_up(line: Line, tmp_path: Path, kind: str, how: str) -> None:
    blobs = MemoryBlobs()
    for name, _ in line.blobs.list(""):
        blobs.put(name, stores.read(line.blobs, name))
    (name,) = [name for name, _ in blobs.list(f"runs/r/{kind}/0.")]
    if how == "spoilt":
        stores.spoil(blobs, name)
    else:
        blobs.delete(name)
    states = States(tmp_path, 1 << 30)
    with pytest.raises(StateLost, match=name):
        advance(states, line, line.task(3), blobs)
    assert advance(states, line, line.task(3)).digest == line.states[3].digest, "nothing wrong is kept"


def test_the_states_that_were_not_used_for_longest_make_room(line: Line, tmp_path: Path) -> None:
    blobs = MemoryBlobs()
    for run in ("a", "b", "c"):
        for name, _ in line.blobs.list(""):
            blobs.put(name.replace("runs/r/", f"runs/{run}/"), stores.read(line.blobs, name))
    states = States(tmp_path, 2 * 2 * 9 * line.elements)  # room for two of them: each has two files
    for run, kept in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("b", "bc")):
        advance(states, line, line.task(2).model_copy(update={"run": run}), blobs)
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"{each}.0.{n}" for each in kept for n in "01"]
