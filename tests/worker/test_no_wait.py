"""sync.wait = "never": a worker trains on until the round's deltas are there, and carries that into its next contribution.

In most of these tests the deltas come when the test says so, after a certain inner step.
"""

import threading
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from harness.coordinator import SettableClock
from protocol.errors import SpecError
from protocol.spec.run import parse_spec
from tests.support.waiting import PATIENCE_S, wait_until
from tests.worker import toy
from tests.worker.test_streaming import Ones, epoch, ones
from tests.worker.toy import Killed, MakeToy, MortalClient, Toy
from worker.diloco import DiLoCo
from worker.link.client import Client
from worker.rounds.in_flight import InFlight

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_h")]

H = 6


def spec(sync: str = "", **options: Any) -> str:
    """The mean of one worker is its own work, and the outer step takes all of it."""
    usual: dict[str, Any] = {"rounds": 2, "upload": "fp32", "download": "fp32", "momentum": 0.0}
    text = toy.spec(steps=H, sync=f'wait = "never"\n{sync}', **usual | options)
    return text.replace("[outer]", "[outer]\nlearning_rate = 1.0")


def without_room(monkeypatch: pytest.MonkeyPatch, has_none: Callable[[str], bool]) -> None:
    """Let workers in threads with such a name have no room to train on while their deltas travel."""
    free = lambda: 1000 if has_none(threading.current_thread().name) else None  # noqa: E731
    monkeypatch.setattr("worker.diloco.host_free_bytes", free)


class Cut(Client):
    """Cut off from the coordinator, as soon as it has something to send, until `back` is set."""

    def __init__(self, *arguments: Any, back: threading.Event, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._back = back

    def contribute(self, member_token, header, frames, **options):
        assert self._back.wait(PATIENCE_S)
        super().contribute(member_token, header, frames, **options)


class CutLater(Cut):
    """Cut off from the coordinator, as soon as it has sent everything, until `back` is set."""

    def contribute(self, member_token, header, frames, **options):
        Client.contribute(self, member_token, header, frames, **options)

    def delta(self, *arguments, **options):
        assert self._back.wait(PATIENCE_S)
        return super().delta(*arguments, **options)


def has_landed(diloco: DiLoCo) -> bool:
    """The next round's units are known, and so everything else of this one."""
    return len(list(islice(diloco.upcoming(), 2))) == 2


def weight(run: Toy, round_number: int) -> int:
    """What weight the contributions to a round had, in units."""
    tokens = run.round(round_number).tokens
    assert tokens is not None
    return tokens // run.info().spec.unit_tokens


@pytest.mark.parametrize("beyond", [1, 4, 17])
def test_what_is_trained_beyond_h_is_in_the_next_contribution(toy_run: MakeToy, beyond: int) -> None:
    """The deltas come while the worker does its last step before `H + beyond`. So its model then has H steps in the mean,
    and the others carried. They are the first of the next H; at least one step is its own."""
    back, starts = threading.Event(), list[float]()

    def on_step(diloco: DiLoCo, values: torch.Tensor) -> None:
        if (diloco.round, diloco.inner_step) == (0, H + beyond - 1):
            back.set()
            wait_until(lambda: has_landed(diloco))
        if (diloco.round, diloco.inner_step) == (1, 0):
            starts.append(float(values[0]))

    run = toy_run(spec())
    units = ones(run, on_step, partial(Cut, back=back))
    run.final()
    assert starts == [H + beyond]
    last = max(H, beyond + 1)
    assert len(set(units)) == len(units) == H + last
    assert (epoch(run).consumed, epoch(run).assigned) == (len(units), {})
    assert [weight(run, round_number) for round_number in (0, 1)] == [H, last]
    final = run.told("a")
    assert final.state_digest == run.info().state_digest


def test_until_its_deltas_are_there_it_trains_from_its_own_outer_step(toy_run: MakeToy) -> None:
    """A worker alone: so the deltas change nothing when they come."""
    back, found = threading.Event(), dict[tuple[int, int], float]()

    def on_step(diloco: DiLoCo, values: torch.Tensor) -> None:
        assert diloco.round is not None
        found[diloco.round, diloco.inner_step] = float(values[0])
        if (diloco.round, diloco.inner_step) == (0, H + 1):
            back.set()
            wait_until(lambda: has_landed(diloco))

    text = spec(momentum=0.5).replace("learning_rate = 1.0", "learning_rate = 0.7")
    ones(toy_run(text), on_step, partial(Cut, back=back))
    reached = 0.7 * (1 + 0.5) * H  # the momentum is 0 before, and H after
    assert [found[0, step] for step in (H - 1, H, H + 1)] == pytest.approx([H - 1, reached, reached + 1])
    assert found[1, 0] == pytest.approx(reached + 2)


@pytest.mark.parametrize(("sync", "most"), [("", 4 * H), ("most_steps = 8", 8)])
def test_it_stops_at_the_most_steps(toy_run: MakeToy, monkeypatch: pytest.MonkeyPatch, sync: str, most: int) -> None:
    """The coordinator is away for longer than it trains on."""
    back, wait = threading.Event(), InFlight.wait

    def waiting(self: InFlight, p: int) -> Any:
        back.set()
        return wait(self, p)

    monkeypatch.setattr(InFlight, "wait", waiting)
    run = toy_run(spec(sync))
    units = ones(run, lambda diloco, values: None, partial(Cut, back=back))
    last = max(H, most - H + 1)
    assert len(units) == H + last
    assert [weight(run, round_number) for round_number in (0, 1)] == [H, last]
    assert (epoch(run).consumed, epoch(run).assigned) == (len(units), {})


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("worker.state.outer_state.MAPPED_FROM", 1, "its outer state is in files"),
        ("worker.diloco.host_free_bytes", lambda: 1000, "and 1 kB are free"),
    ],
    ids=["in files", "little memory"],
)
def test_a_worker_without_room_for_copies_waits_and_says_why(
    toy_run: MakeToy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: Any,
    why: str,
) -> None:
    monkeypatch.setattr(name, value)
    caplog.set_level("INFO")
    run = toy_run(spec(rounds=3))
    steps = list[tuple[int, int]]()
    ones(run, lambda diloco, values: steps.append((diloco.round, diloco.inner_step)), state_dir=tmp_path / "a")
    last = {round_: max(step for each, step in steps if each == round_) for round_ in range(run.final().round)}
    assert set(last.values()) <= set(range(H + 1)), "none beyond H"
    assert sum(weight(run, round_) for round_ in last) == 3 * H
    assert run.told("a").state_digest == run.info().state_digest
    assert epoch(run).assigned == {}
    (said,) = [each for each in caplog.messages if each.startswith("this worker waits for its deltas")]
    assert why in said


@pytest.mark.parametrize("short_first", [False, True], ids=["had room", "has room again"])
def test_a_worker_that_is_started_again_may_have_another_amount_of_memory(
    toy_run: MakeToy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_first: bool
) -> None:
    """One that trained on has saved the start of a round, and one that waited the work of one."""
    short = lambda now: monkeypatch.setattr("worker.diloco.host_free_bytes", lambda: 1000 if now else None)  # noqa: E731

    def kill(diloco: DiLoCo, values: torch.Tensor) -> None:
        if diloco.round == 2:
            diloco.client.die()  # type: ignore[attr-defined]

    run = toy_run(spec(rounds=5))
    short(short_first)
    with pytest.raises(Killed):
        ones(run, kill, partial(MortalClient, dies=lambda *_: False), tmp_path / "a")
    short(not short_first)
    ones(run, lambda diloco, values: None, state_dir=tmp_path / "a")
    info, told = run.final(), epoch(run)
    assert run.told("a").state_digest == info.state_digest
    assert told.assigned == {}
    assert info.tokens == told.consumed * info.spec.unit_tokens


def contributors(run: Toy, round_number: int) -> set[str]:
    """Who has contributed to all fragments of a round."""
    return set.intersection(*(set(each.contributors) for each in run.round(round_number).fragments))


def test_what_a_worker_trained_while_rounds_closed_without_it_is_dropped(
    toy_run: MakeToy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has contributed to round 0, and gets its deltas once rounds 1 and 2 have closed. So it starts round 3 from the
    others' state, and the units are trained on again."""
    without_room(monkeypatch, lambda name: name == "b")
    back, own, clock, starts = threading.Event(), list[int](), SettableClock(), list[float]()

    def on_step(diloco: DiLoCo, values: torch.Tensor) -> None:
        if (diloco.round, diloco.inner_step) == (0, 1):
            other.start()
        if (diloco.round, diloco.inner_step) == (0, 2 * H):
            try:
                for round_ in (1, 2):
                    wait_until(lambda: run.info().round == round_ and "b" in contributors(run, round_))  # noqa: B023
                    clock.advance(10)
                wait_until(lambda: run.info().round == 3)
            finally:
                back.set()
        if (diloco.round, diloco.inner_step) == (3, 0):
            starts.append(float(values[0]))

    def after_it(diloco: DiLoCo, values: torch.Tensor) -> None:
        if diloco.round == 0 and diloco.inner_step == H - 1:
            wait_until(lambda: "a" in contributors(run, 0))
        if diloco.round >= 3 and diloco.inner_step == H - 1:
            wait_until(lambda: "a" in contributors(run, diloco.round))

    run = toy_run(spec(rounds=5, min_workers=1, members="round_max_s = 10"), clock=clock)
    other = threading.Thread(target=lambda: own.extend(ones(run, after_it, name="b")), name="b")
    ones(run, on_step, partial(CutLater, back=back))
    other.join(PATIENCE_S)
    info, told = run.final(), epoch(run)
    assert starts == [3 * H]
    dropped = run.told("a").account.dropped_steps
    assert f"before this worker had the deltas of round 0: its {dropped} inner steps since are dropped" in caplog.text
    assert dropped >= H > run.told("b").account.dropped_steps == 0
    assert [weight(run, round_) for round_ in range(1, 4)] == [H, H, 2 * H]
    assert told.assigned == {}
    assert info.tokens == told.consumed * info.spec.unit_tokens
    assert run.told("a").state_digest == run.told("b").state_digest == info.state_digest


def test_a_loader_loads_one_unit_at_a_time_beyond_h(toy_run: MakeToy) -> None:
    rows = TensorDataset(torch.arange(4096.0).reshape(-1, 1))
    model = Ones()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = toy_run(spec(rounds=3))
    with run.connect(model, optimizer) as diloco:
        loader: Any = DataLoader(rows, batch_sampler=diloco.unit_sampler(rows))
        steps = 0
        while not diloco.finished:
            for _ in loader:
                model().backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
    assert steps > 3 * H
    assert (epoch(run).consumed, epoch(run).assigned) == (steps, {})


@pytest.mark.parametrize(
    ("sync", "why"),
    [
        ('wait = "never"\noverlap = 2', 'need wait = "always"'),
        ('wait = "never"\noffsets = "spread"', 'need wait = "always"'),
        ('wait = "never"\nalpha = 0.5', 'need wait = "always"'),
        ('wait = "always"\nmost_steps = 20', 'most_steps is for wait = "never"'),
        ('wait = "never"\nmost_steps = 6', r"more than H \(6\)"),
    ],
)
def test_what_does_not_go_together(sync: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        parse_spec(toy.spec(steps=H, sync=sync))


def test_a_worker_with_an_h_of_its_own_trains_on_for_as_many_times_of_it() -> None:
    auto = toy.spec(steps=100, sync='wait = "never"')
    assert parse_spec(auto).sync.most_steps_of(50) == 200
    assert parse_spec(auto.replace("[members]", "most_steps = 250\n[members]")).sync.most_steps_of(51) == 128
    assert parse_spec(toy.spec(steps=H)).sync.most_steps_of(H) == H
