"""DiLoCo against the real coordinator: identical replicas, kill −9 at every point of a round, late work, lost
leases."""

import sqlite3
import threading
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from protocol.errors import CodecError
from tests.support.waiting import PATIENCE_S, wait_until
from tests.worker import toy
from tests.worker.toy import MakeToy, Toy, coordinator_thread
from worker.diloco import DiLoCo
from worker.link.client import Client
from worker.state.fragments import Fragments

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final state digest of the toy run with one worker that nobody disturbs."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with coordinator_thread(directory / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(), directory)
        run.worker("a")
        digest = run.final().state_digest
    assert digest is not None
    return digest


# --- leases -------------------------------------------------------------------------------------------------------


def evict(run: Toy, name: str) -> None:
    """End the worker's lease, as its expiry would: its units return to the pool."""
    with run.coordinator.client() as http:
        http.delete(f"/v1/runs/toy/workers/{name}").raise_for_status()


def test_a_lost_lease_whose_units_nobody_took(toy_run: MakeToy, undisturbed: str) -> None:
    """The worker learns of it at its upload, joins again, gets the same units again and hands in the same work."""

    def lose(diloco: DiLoCo) -> None:
        if (diloco.round, diloco.inner_step) == (1, 2):
            evict(run, "a")

    run = toy_run()
    run.worker("a", on_step=lose)
    assert run.final().state_digest == undisturbed
    assert run.told("a").epoch == 2


@pytest.mark.parametrize("noticed", ["at the upload", "by the heartbeat"])
def test_a_lost_lease_whose_units_somebody_took(toy_run: MakeToy, noticed: str) -> None:
    """The work is dropped, the worker trains on other units, no unit is trained on twice, and the replicas stay
    identical."""
    b_has_units = threading.Event()
    a_is_back = threading.Event()
    a_may_begin = threading.Event()

    def lose(diloco: DiLoCo) -> None:
        if (diloco.round, diloco.inner_step) == (0, 2) and not b_has_units.is_set():
            evict(run, "a")
            a_may_begin.set()
            assert b_has_units.wait(PATIENCE_S)
            if noticed == "by the heartbeat":
                diloco.joined.heartbeat.beat()
        elif diloco.inner_step == 1 and b_has_units.is_set():
            a_is_back.set()

    def take(diloco: DiLoCo) -> None:
        b_has_units.set()
        if (diloco.round, diloco.inner_step) == (0, 2):
            assert a_is_back.wait(PATIENCE_S)

    def run_b() -> None:
        assert a_may_begin.wait(PATIENCE_S)
        run.worker("b", on_step=take)

    run = toy_run(toy.spec(rounds=2))
    b = threading.Thread(target=run_b)
    b.start()
    a = run.worker("a", on_step=lose)
    b.join(PATIENCE_S)
    info = run.final()
    for name in "ab":
        assert run.told(name).state_digest == info.state_digest
    assert info.tokens == 2 * 2 * toy.STEPS * a.spec.unit_tokens


# --- other ways to train ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost_at", [None, toy.STEPS, 2 * toy.STEPS - 1])
def test_a_loop_that_knows_nothing_of_units(toy_run: MakeToy, undisturbed: str, lost_at: int | None) -> None:
    """The hook alone: any loop that looks at `finished`; also where a lease is lost just before a round's first or last step."""
    run = toy_run()
    model, optimizer = toy.model_and_optimizer()
    unit = 0
    with run.connect(model, optimizer) as diloco:
        while not diloco.finished:
            if unit == lost_at:
                evict(run, "a")
                diloco.joined.heartbeat.beat()
            toy.step(diloco, model, optimizer, unit)
            unit += 1
    assert unit == 3 * toy.STEPS
    assert run.final().state_digest == undisturbed


@pytest.mark.parametrize(("fused", "takes_units"), [(False, True), (True, False)])
def test_the_infinite_loss_of_a_skipped_step_is_no_divergence(toy_run: MakeToy, fused: bool, takes_units: bool) -> None:
    """A GradScaler skips the step of a loss that overflows, and what was reported for it ended the worker."""
    run, model = toy_run(toy.spec(rounds=2)), toy.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    with run.connect(model, optimizer) as diloco:
        units = diloco.units() if takes_units else iter(range(1000))
        for unit in units:
            if diloco.finished:
                break
            x, y = toy.batch(unit)
            loss = torch.nn.functional.mse_loss(model(x), y) * (float("inf") if unit == 1 else 1)
            diloco.report_loss(loss)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert run.info().state == "finished"
    told = run.told("a").metrics.loss
    assert told is not None
    assert told < 1


def test_an_optimizer_without_a_learning_rate_trains(toy_run: MakeToy) -> None:
    """It was a KeyError after the first step."""

    class Still(torch.optim.Optimizer):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__(model.parameters(), {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for each in group["params"]:
                    each.data.sub_(each.grad, alpha=0.01)

    run, model = toy_run(toy.spec(rounds=1)), toy.make_model()
    optimizer = Still(model)
    with run.connect(model, optimizer) as diloco:
        for unit in diloco.units():
            toy.step(diloco, model, optimizer, unit)
    assert run.final().state == "finished"


def test_a_step_that_a_fused_optimizer_skips_does_not_count(toy_run: MakeToy) -> None:
    """A GradScaler calls it all the same, and its kernel skips: the step counted, with a unit that nothing was learnt
    from."""
    run = toy_run(toy.spec(rounds=2))
    model, optimizer = toy.model_and_optimizer(lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    seen = []
    with run.connect(model, optimizer) as diloco:
        for unit in diloco.units():
            seen.append((diloco.inner_step, unit))
            x, y = toy.batch(unit)
            scaler.scale(torch.nn.functional.mse_loss(model(x), y)).backward()
            if unit == 1:
                next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert run.info().state == "finished"
    assert seen == [(0, 0), (1, 1), (1, 2), (2, 3), (0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.parametrize(
    ("skipped", "sync"),
    [({1, 2}, ""), ({3}, ""), ({0, 1, 2, 3}, ""), ({3}, 'overlap = 1\noffsets = "spread"'), ({3}, 'overlap = "eager"')],
)
def test_a_unit_whose_step_was_skipped_is_spent_and_counts(toy_run: MakeToy, skipped: set[int], sync: str) -> None:
    """A GradScaler that is still looking for its scale. The last unit of a round went back to the pool, and was counted
    as carried work that never came where fragments travel meanwhile; the others were spent."""
    run = toy_run(toy.spec(rounds=3, sync=sync))
    model, optimizer = toy.model_and_optimizer()
    seen = []
    with run.connect(model, optimizer) as diloco:
        for unit in diloco.units():
            seen.append(unit)
            if unit in skipped:
                model(toy.batch(unit)[0]).sum().backward()
                optimizer.zero_grad()
            else:
                toy.step(diloco, model, optimizer, unit)
    info = run.final()
    assert seen == list(range(3 * toy.STEPS))
    assert info.state_digest == run.told("a").state_digest
    assert info.tokens == 3 * toy.STEPS * info.spec.unit_tokens


@pytest.mark.parametrize(("leaves", "used"), [("at the next unit", 3), ("with the unit in hand", 2)])
def test_leaving_after_a_skipped_step(toy_run: MakeToy, leaves: str, used: int) -> None:
    """What the loop was through with is handed in, what it had just begun goes back to the pool."""
    run = toy_run(toy.spec(rounds=2))
    model, optimizer = toy.model_and_optimizer()
    with run.connect(model, optimizer) as diloco:
        for unit in diloco.units():
            if unit == 2:  # skipped
                if leaves == "with the unit in hand":
                    break
                diloco.client.stop.set()
            else:
                toy.step(diloco, model, optimizer, unit)
    assert run.told("a").tokens == used * diloco.spec.unit_tokens
    given: list[int] = []
    run.worker("b", on_step=lambda diloco: given.extend(chain(*diloco.joined.rounds.assignment.units)))
    info = run.final()
    assert info.state_digest == run.told("b").state_digest
    assert min(given) == used


def test_asked_to_stop(toy_run: MakeToy) -> None:
    """The inner step is finished and handed in with those before it, the other units go back to the pool, and the next
    worker goes on with them, at the learning rate of the next step: the run has as many as it would have had."""
    units: list[int] = []
    seen: list[tuple[int, int]] = []

    def note(diloco: DiLoCo) -> None:
        units.extend(chain(*diloco.joined.rounds.assignment.units))
        seen.append((diloco.round, diloco.global_step))

    def stop(diloco: DiLoCo) -> None:
        if (diloco.round, diloco.inner_step) == (1, 2):
            diloco.client.stop.set()

    run = toy_run()
    assert run.worker("a", on_step=stop).inner_step == 2
    assert run.told("a").state == "left"
    run.worker("b", on_step=note)
    info = run.final()
    assert info.state_digest == run.told("b").state_digest
    assert info.round == info.rounds == 4
    assert info.tokens == 3 * toy.STEPS * info.spec.unit_tokens
    assert min(units) == toy.STEPS + 2
    assert seen == [(2, 7), (2, 8), (2, 9), (3, 10), (3, 11), (4, 12)], "after each step"


def test_a_fragment_is_gathered_while_those_before_it_travel(
    toy_run: MakeToy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here not before the coordinator has them: who gathers all of it first waits for ever."""
    gather, gathered = Fragments.pseudo_gradient, []

    run = toy_run()

    def after_the_last(fragments: Fragments, p: int, *state: Any) -> torch.Tensor:
        opening = run.coordinator.live("toy").open
        assert opening is not None
        wait_until(lambda: all(each.contributed for each in opening.fragments[:p]))
        gathered.append(p)
        return gather(fragments, p, *state)

    monkeypatch.setattr(Fragments, "pseudo_gradient", after_the_last)
    run.worker("a", state_dir=tmp_path / "state")
    run.final()
    assert gathered == 3 * [0, 1, 2]


def test_diverged_training_sends_nothing(toy_run: MakeToy) -> None:
    run = toy_run()
    with pytest.raises(CodecError, match="round 0: the training has diverged"):
        run.worker("a", lr=lambda diloco: 1e35)
    assert run.told("a").contributions == 0


def test_outside_of_with_it_says_what_is_missing(toy_run: MakeToy) -> None:
    run = toy_run()
    model, optimizer = toy.model_and_optimizer(torch.optim.SGD, lr=0.1)
    diloco = run.connect(model, optimizer)
    with pytest.raises(RuntimeError, match="DiLoCo is a context manager"):
        next(diloco.units())
    with diloco:
        assert next(diloco.units()) == 0


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_a_worker_may_begin_and_end_while_an_optimizer_of_another_thread_steps(toy_run: MakeToy, register: Any) -> None:
    """Torch iterates over its global hooks meanwhile. Here the step itself waits for another worker's whole life."""
    lived, parameter = list[DiLoCo](), nn.Parameter(torch.ones(1))
    stepping = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(1)
    run = toy_run(toy.spec(rounds=1))

    def live(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer is stepping:
            lived.extend(run.workers(["a"]).values())

    hooks = [register(live), register(lambda *_: None)]
    try:
        stepping.step()
    finally:
        for hook in hooks:
            hook.remove()
    assert len(lived) == 1


# --- a worker that comes late --------------------------------------------------------------------------------------


class Hurried(Client):
    """Is told to do 3 inner steps only in round 0."""

    def assignment(self, *arguments, **options):
        answer = super().assignment(*arguments, **options)
        return answer.model_copy(update={"inner_steps": 3}) if answer.round == 0 else answer


def test_fewer_inner_steps_hand_in_the_first_units_and_the_others_are_trained_on_later(
    toy_run: MakeToy, tmp_path: Path
) -> None:
    run = toy_run(toy.spec(rounds=3))
    done = run.worker("a", client_class=Hurried)
    assert run.final().state_digest is not None
    rounds = run.get("/rounds")["items"]
    with sqlite3.connect(tmp_path / "coordinator" / "outerstep.db") as database:
        units = database.execute("SELECT start, stop, state FROM unit_ranges ORDER BY start").fetchall()
    tokens = {each["round"]: each["tokens"] for each in rounds}
    # The step that round 0 lacked is done in a fourth round.
    assert [tokens[number] // done.spec.unit_tokens for number in range(4)] == [3, toy.STEPS, toy.STEPS, 1]
    # Unit 3 was given out again, before any new one: 12 inner steps, 12 units, none of them left out.
    assert {state for _, _, state in units} == {"consumed"}
    assert (units[0][0], units[-1][1]) == (0, 12)
