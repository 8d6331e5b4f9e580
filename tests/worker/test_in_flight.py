"""The fragments of a round in flight, on an exchange scripted by the test."""

import threading
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.waiting import PATIENCE_S
from worker.rounds import in_flight as flight_module
from worker.rounds.exchange import Outcome
from worker.rounds.in_flight import InFlight
from worker.state.work import Contribution, Missed, Superseded

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


@pytest.fixture(autouse=True)
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


def test_nothing_is_uploaded_without_the_snapshot_and_then_nothing_is_mixed() -> None:
    exchange: Any = Exchange(None, None, None)
    failed = Future[None]()
    failed.set_exception(OSError("disk full"))
    flight = InFlight(exchange, 7, failed)
    flight.send_made(contribution(0))
    with pytest.raises(OSError, match="disk full"):
        flight.wait(0)
    assert (exchange.uploaded, exchange.state.round) == ([], 7)
