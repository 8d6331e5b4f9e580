"""A round: counting inner steps, the units that were used, the schedule's place, the warmup of a joiner; when fragments are
sent and merged; and those in flight."""

import threading
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import Action, Assignment
from protocol.spec.run import RunSpec, parse_spec
from protocol.spec.sections import SyncSpec
from tests.support.waiting import PATIENCE_S
from worker.rounds import in_flight as flight_module
from worker.rounds.exchange import Outcome
from worker.rounds.in_flight import InFlight
from worker.rounds.schedule import ON_ARRIVAL, Schedule, schedule
from worker.rounds.training import InnerSteps
from worker.state.work import Contribution, Missed, Superseded


def spec(warmup: int = 4, wait: str = "always") -> RunSpec:
    return parse_spec(f"""
name = "r"
[model]
preset = "tiny"
[inner]
joiner_warmup_steps = {warmup}
[sync]
rounds = 10
inner_steps = 6
wait = "{wait}"
""")


def begin(steps: InnerSteps, round_number: int = 0, inner_steps: int = 6, scheduled: int = 6) -> None:
    assignment = Assignment(
        action=Action.TRAIN,
        reason="",
        round=round_number,
        step=scheduled * round_number,
        schedule_steps=scheduled,
        inner_steps=inner_steps,
        units=[[10, 12], [20, 18 + inner_steps]],
    )
    steps.begin(assignment)


def test_units_used_are_those_of_the_steps_done() -> None:
    steps = InnerSteps(spec())
    begin(steps)
    seen = []
    for _ in range(6):
        steps.begin_unit()
        seen.append(steps.units_used)
        steps.step()
    assert seen == [[], [[10, 11]], [[10, 12]], [[10, 12], [20, 21]], [[10, 12], [20, 22]], [[10, 12], [20, 23]]]
    assert steps.units_used == [[10, 12], [20, 24]]
    begin(steps, 1)
    assert (steps.done, steps.units_used) == (0, [])


def test_a_loop_that_takes_no_units_uses_one_per_step() -> None:
    steps = InnerSteps(spec())
    begin(steps)
    for _ in range(3):
        steps.step()
    assert steps.units_used == [[10, 12], [20, 21]]


@pytest.mark.parametrize("skipped", [{0}, {2}, {5}, {0, 1}, {1, 4, 5}, set(range(6))])
def test_a_skipped_step_uses_its_unit_wherever_it_lies(skipped: set[int]) -> None:
    """One in the middle was used, one at the end went back to the pool, and where all were skipped all were used."""
    steps = InnerSteps(spec())
    begin(steps)
    for unit in range(6):
        steps.begin_unit()
        if unit not in skipped:
            steps.step()
        steps.end_unit()
        assert sum(stop - start for start, stop in steps.units_used) == unit + 1
    assert steps.units_used == [[10, 12], [20, 24]]
    assert steps.done == 6 - len(skipped)


def test_the_unit_in_hand_is_not_used_yet() -> None:
    steps = InnerSteps(spec())
    begin(steps)
    steps.begin_unit()
    assert steps.units_used == []
    steps.end_unit()
    steps.begin_unit()
    assert steps.units_used == [[10, 11]]


def test_a_unit_of_the_last_round_uses_none_of_the_next() -> None:
    """The round's last step begins the next round before the loop asks for another unit."""
    steps = InnerSteps(spec())
    begin(steps)
    steps.begin_unit()
    steps.step()
    begin(steps, 1)
    steps.end_unit()
    assert steps.units_used == []


@pytest.mark.parametrize(("own", "seen"), [(6, [0, 1, 2, 3, 4, 5]), (3, [0, 2, 4]), (4, [0, 1, 3, 4])])
def test_all_workers_walk_through_the_schedule_together(own: int, seen: list[int]) -> None:
    """Whatever H a worker has of its own: a round is as long in the schedule for all of them."""
    steps = InnerSteps(spec())
    for round_number in (0, 7):
        begin(steps, round_number, own)
        walked = []
        for _ in range(own):
            walked.append(steps.global_step)
            steps.step()
        assert walked == [6 * round_number + step for step in seen]
        assert steps.global_step == 6 * (round_number + 1)


@pytest.mark.parametrize(
    ("warmup", "joins_at", "expected"),
    [
        (4, 5, [0.2, 0.4, 0.6, 0.8, 1, 1]),
        (4, 0, [1] * 6),  # who was there from the start has the run's warmup only
        (0, 5, [1] * 6),
    ],
)
def test_a_joiner_warms_up_once(warmup: int, joins_at: int, expected: list[float]) -> None:
    steps = InnerSteps(spec(warmup))
    begin(steps, round_number=joins_at)
    scales = []
    for _ in range(6):
        scales.append(steps.warmup_scale)
        steps.step()
    assert scales == pytest.approx(expected)
    begin(steps, round_number=joins_at + 1)
    assert steps.warmup_scale == 1


def test_units_to_come_are_those_behind_the_one_in_hand() -> None:
    steps = InnerSteps(spec())
    assert steps.units_to_come == []
    begin(steps)
    seen = [steps.units_to_come]
    for unit in range(6):
        steps.begin_unit()
        seen.append(steps.units_to_come)
        if unit != 2:  # its step is skipped
            steps.step()
        steps.end_unit()
    assert seen == [
        [[10, 12], [20, 24]],
        [[11, 12], [20, 24]],
        [[20, 24]],
        [[21, 24]],
        [[22, 24]],
        [[23, 24]],
        [],
    ]


def test_units_to_come_are_as_many_as_there_are_steps() -> None:
    """An assignment may have more units than this worker takes inner steps."""
    steps = InnerSteps(spec())
    units = [[0, 10]]
    steps.begin(Assignment(action=Action.TRAIN, reason="", round=0, inner_steps=3, units=units))
    steps.begin_unit()
    assert steps.units_to_come == [[1, 3]]
    steps.step()  # a loop that takes no more units here
    steps.step()
    assert steps.units_to_come == [[2, 3]]


@pytest.mark.parametrize(("units", "steps_done"), [([[10, 11]], 1), ([[10, 34]], 24)])
def test_a_worker_that_never_waits_goes_on_as_long_as_it_has_units(units: list[list[int]], steps_done: int) -> None:
    """It has fewer than H if an earlier process of it contributed to the round as it left. Found by the simulation: a step
    more than there were units counted twice."""
    steps = InnerSteps(spec(wait="never"))
    steps.begin(Assignment(action=Action.TRAIN, reason="", round=1, schedule_steps=6, inner_steps=6, units=units))
    while steps.may_go_on:
        steps.begin_unit()
        steps.step()
    assert steps.done == steps_done


@pytest.mark.parametrize(
    ("wait", "ahead", "own", "ready"),
    [
        ("never", 0, 6, False),
        ("never", 2, 4, False),
        ("never", 6, 1, True),
        ("never", 9, 1, True),
        ("always", 2, 6, False),
    ],
)
def test_steps_while_the_last_deltas_travelled_are_the_first_of_h(wait: str, ahead: int, own: int, ready: bool) -> None:
    steps = InnerSteps(spec(wait=wait))
    units = [[10, 34]]
    steps.begin(
        Assignment(action=Action.TRAIN, reason="", round=1, step=6, schedule_steps=6, inner_steps=6, units=units), ahead
    )
    assert (steps.own, steps.ready) == (own, ready)
    assert steps.global_step == 6
    for _ in range(own):
        steps.step()
    assert steps.global_step == 12
    assert steps.may_go_on == (wait == "never")


# --- when fragments are sent and merged ----------------------------------------------------------------------------


def sync_spec(**keys: Any) -> SyncSpec:
    return SyncSpec(rounds=5, **{"wait": "always", **keys})


@pytest.mark.parametrize(
    ("keys", "when", "expected"),
    [
        ({}, {}, Schedule([12] * 3, [12] * 3)),
        ({"overlap": 5}, {}, Schedule([7] * 3, [12] * 3)),
        ({"overlap": "eager"}, {}, Schedule([0] * 3, [12] * 3)),
        ({"offsets": "spread"}, {}, Schedule([4, 8, 12], [4, 8, 12])),
        ({"offsets": "spread", "overlap": 3}, {}, Schedule([1, 5, 9], [4, 8, 12])),
        ({"offsets": "spread", "overlap": 6}, {}, Schedule([0, 2, 6], [4, 8, 12])),
        ({"wait": "never"}, {}, Schedule([12] * 3, [ON_ARRIVAL] * 3)),
        # A worker that is behind sends at once if it never waits.
        ({"wait": "never"}, {"at_once": True}, Schedule([0] * 3, [ON_ARRIVAL] * 3)),
        ({}, {"at_once": True}, Schedule([12] * 3, [12] * 3)),
        # A worker that has nothing yet sends half way what is due at once.
        ({"overlap": "eager"}, {"first": True}, Schedule([6] * 3, [12] * 3)),
        ({"offsets": "spread", "overlap": 6}, {"first": True}, Schedule([2, 2, 6], [4, 8, 12])),
        # The last round leaves nothing over.
        ({"overlap": "eager"}, {"last": True}, Schedule([12] * 3, [12] * 3)),
        ({"overlap": 5}, {"last": True}, Schedule([12] * 3, [12] * 3)),
        ({"offsets": "spread"}, {"last": True}, Schedule([12] * 3, [12] * 3)),
        ({"wait": "never"}, {"last": True}, Schedule([12] * 3, [12] * 3)),
    ],
)
def test_when_three_fragments_are_sent_and_merged(
    keys: dict[str, Any], when: dict[str, bool], expected: Schedule
) -> None:
    assert schedule(sync_spec(inner_steps=12, **keys), 3, 12, **{"last": False, "first": False} | when) == expected


@given(st.data())
def test_whatever_the_spec_says(data: st.DataObject) -> None:
    h, fragments = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 50))
    offsets = data.draw(st.sampled_from(["together", "spread"]))
    overlaps: st.SearchStrategy[int | str] = st.integers(0, h - 1)
    if offsets == "together":
        overlaps |= st.just("eager")
    sync = sync_spec(inner_steps=h, offsets=offsets, overlap=data.draw(overlaps))
    first = data.draw(st.booleans())
    found = schedule(sync, fragments, h, last=data.draw(st.booleans()), first=first)
    assert len(found.sent) == len(found.merged) == fragments
    assert all(0 <= sent <= merged <= h for sent, merged in zip(found.sent, found.merged, strict=True))
    assert min(found.merged) >= 1
    assert found.merged[-1] == h
    assert found.merged == sorted(found.merged)
    if first:
        assert min(found.sent) >= 1
    else:
        assert found.sent == sorted(found.sent), "the line takes them in order"


# --- fragments in flight, on an exchange scripted by the test ------------------------------------------------------


FRAGMENTS = 3


class State(list[None]):
    """An outer state of three fragments that only counts."""

    def __init__(self) -> None:
        super().__init__([None] * FRAGMENTS)
        self.round: int | None = 7
        self.own = list(range(FRAGMENTS))
        self.theta = [torch.ones(2)] * FRAGMENTS
        self.stepped: list[int] = []

    def begin_changes(self) -> None:
        self.round = None

    def release_pseudo_gradient(self, p: int) -> None:
        pass

    def reach(self, round_number: int) -> None:
        self.round = round_number

    def step(self, p: int, delta: object) -> None:
        self.stepped.append(p)


class Exchange:
    """Each fragment's upload has its entry in `outcomes`; every delta is there."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.state, self.client = State(), SimpleNamespace(stages=lambda stage: nullcontext())
        self._outcomes = outcomes
        self.uploaded: list[int] = []

    def contribute(self, contribution: Contribution, on_line: Any) -> Outcome:
        on_line()
        self.uploaded.append(contribution.fragment)
        return self._outcomes[contribution.fragment]

    def await_delta(
        self, contribution: Contribution, sent: threading.Event, failed: threading.Event, found: Any
    ) -> tuple[Any, list[Outcome]]:
        found()
        return None, []

    def unsent(self, contribution: Contribution) -> None:
        return None

    def log_verdict(self, contribution: Contribution, delta: None) -> None:
        return None


def contribution(p: int) -> Contribution:
    """Of p + 2 units: each fragment is sent one inner step later."""
    return Contribution(7, p, [[10, 12 + p]], 1, p + 2, 0.5, 1.0, torch.ones(2))


@pytest.fixture
def mean_of_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_module, "unpack_payload", lambda payload, device, elements: torch.ones(elements))


@pytest.mark.parametrize(
    ("outcomes", "consumed"),
    [
        ((None, None, None), 4),
        ((None, None, 0.5), 3),
        ((0.5, 0.5, 0.5), 0),
        ((None, Superseded(), Superseded()), 2),
        ((0.5, Superseded(), Superseded()), 0),
    ],
)
@pytest.mark.usefixtures("mean_of_ones")
def test_units_travel_on_unless_a_contribution_that_names_them_was_accepted(
    outcomes: tuple[Outcome, ...], consumed: int
) -> None:
    exchange: Any = Exchange(*outcomes)
    flight = InFlight(exchange, 7)
    assert exchange.state.round == 7
    for p in range(FRAGMENTS):
        flight.send_made(contribution(p))
    left = [flight.wait(p) for p in range(FRAGMENTS)]
    flight.end()
    assert flight.consumed == consumed
    assert flight.superseded == any(isinstance(outcome, Superseded) for outcome in outcomes)
    assert flight.inner_steps == 4
    assert exchange.state.round == 8
    for each, outcome in zip(left, outcomes, strict=True):
        assert isinstance(each, {float: Missed, Superseded: Superseded, type(None): type(None)}[type(outcome)])


@pytest.mark.usefixtures("mean_of_ones")
def test_what_is_sent_once_a_snapshot_is_being_written_waits_for_it() -> None:
    exchange: Any = Exchange(None, None, None)
    flight, saved, made = InFlight(exchange, 7), Future[None](), threading.Event()

    def last() -> Contribution:
        made.set()
        return contribution(2)

    flight.send_made(contribution(0))
    flight.send_made(contribution(1))
    flight.saved = saved
    flight.send(2, last)
    assert made.wait(PATIENCE_S)
    flight.wait(0)
    flight.wait(1)
    assert exchange.uploaded == [0, 1]
    saved.set_result(None)
    flight.end()
    assert exchange.uploaded == [0, 1, 2]


@pytest.mark.usefixtures("mean_of_ones")
def test_nothing_is_uploaded_without_the_snapshot_and_then_nothing_is_mixed() -> None:
    exchange: Any = Exchange(None, None, None)
    failed = Future[None]()
    failed.set_exception(OSError("disk full"))
    flight = InFlight(exchange, 7, failed)
    flight.send_made(contribution(0))
    with pytest.raises(OSError, match="disk full"):
        flight.wait(0)
    assert (exchange.uploaded, exchange.state.round) == ([], 7)
