"""DiLoCo against the real coordinator: identical replicas, kill −9 at every point of a round, late work, lost
leases."""

import threading
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from protocol.errors import CodecError, Problem
from tests.support.waiting import PATIENCE_S, wait_until
from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread
from worker.diloco import DiLoCo
from worker.link.client import Client, open_http
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


def parameters(diloco: DiLoCo) -> list[bytes]:
    return [parameter.detach().numpy().tobytes() for parameter in diloco.model.parameters()]


@pytest.mark.parametrize(
    ("upload", "download"),
    [("fp32", "fp32"), ("int8", "int8"), ("ternary", "int4")],
)
def test_replicas_are_identical(tmp_path: Path, upload: str, download: str) -> None:
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(min_workers=3, upload=upload, download=download), tmp_path)
        done = run.workers(["a", "b", "c"])
        info = run.final()
        assert info.state_digest is not None
        for name in "abc":
            assert run.told(name).state_digest == info.state_digest
            assert run.told(name).state_round == 3
    assert parameters(done["a"]) == parameters(done["b"]) == parameters(done["c"])
    assert info.tokens == 3 * 3 * toy.STEPS * done["a"].spec.unit_tokens


# --- leases -------------------------------------------------------------------------------------------------------


def evict(run: Toy, name: str) -> None:
    """End the worker's lease, as its expiry would: its units return to the pool."""
    with run.coordinator.client() as http:
        http.delete(f"/v1/runs/toy/workers/{name}").raise_for_status()


def test_a_lost_lease_whose_units_nobody_took(tmp_path: Path, undisturbed: str) -> None:
    """The worker learns of it at its upload, joins again, gets the same units again and hands in the same work."""

    def lose(diloco: DiLoCo) -> None:
        if (diloco.round, diloco.inner_step) == (1, 2):
            evict(run, "a")

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(), tmp_path)
        run.worker("a", on_step=lose)
        assert run.final().state_digest == undisturbed
        assert run.told("a").epoch == 2


@pytest.mark.parametrize("noticed", ["at the upload", "by the heartbeat"])
def test_a_lost_lease_whose_units_somebody_took(tmp_path: Path, noticed: str) -> None:
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

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=2), tmp_path)
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
def test_a_loop_that_knows_nothing_of_units(tmp_path: Path, undisturbed: str, lost_at: int | None) -> None:
    """The hook alone: any loop that looks at `finished`; also where a lease is lost just before a round's first or last step."""
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(), tmp_path)
        model = toy.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
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


def test_skipped_steps_do_not_count(tmp_path: Path) -> None:
    """A GradScaler skips a step: the units of the round are used up with one inner step less."""
    steps: list[int] = []

    def record(*_: object) -> None:
        steps.append(1)

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=2), tmp_path)
        model = toy.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer.register_step_post_hook(record)
        seen = []
        with run.connect(model, optimizer) as diloco:
            for unit in diloco.units():
                seen.append((diloco.global_step, unit))
                if unit != 2:
                    toy.step(diloco, model, optimizer, unit)
        assert run.info().state == "finished"
    assert len(steps) == 2 * toy.STEPS - 1
    assert seen == [(0, 0), (1, 1), (2, 2), (2, 3), (4, 4), (5, 5), (6, 6), (7, 7)]


@pytest.mark.parametrize(("fused", "takes_units"), [(False, True), (True, False)])
def test_the_infinite_loss_of_a_skipped_step_is_no_divergence(tmp_path: Path, fused: bool, takes_units: bool) -> None:
    """A GradScaler skips the step of a loss that overflows, and what was reported for it ended the worker."""
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run, model = Toy(coordinator, toy.spec(rounds=2), tmp_path), toy.make_model()
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


def test_an_optimizer_without_a_learning_rate_trains(tmp_path: Path) -> None:
    """It was a KeyError after the first step."""

    class Still(torch.optim.Optimizer):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__(model.parameters(), {})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for each in group["params"]:
                    each.data.sub_(each.grad, alpha=0.01)

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run, model = Toy(coordinator, toy.spec(rounds=1), tmp_path), toy.make_model()
        optimizer = Still(model)
        with run.connect(model, optimizer) as diloco:
            for unit in diloco.units():
                toy.step(diloco, model, optimizer, unit)
        assert run.final().state == "finished"


def test_a_step_that_a_fused_optimizer_skips_does_not_count(tmp_path: Path) -> None:
    """A GradScaler calls it all the same, and its kernel skips: the step counted, with a unit that nothing was learnt
    from."""
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=2), tmp_path)
        model = toy.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
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
def test_a_unit_whose_step_was_skipped_is_spent_and_counts(tmp_path: Path, skipped: set[int], sync: str) -> None:
    """A GradScaler that is still looking for its scale. The last unit of a round went back to the pool, and was counted
    as carried work that never came where fragments travel meanwhile; the others were spent."""
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=3, sync=sync), tmp_path)
        model = toy.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
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
def test_leaving_after_a_skipped_step(tmp_path: Path, leaves: str, used: int) -> None:
    """What the loop was through with is handed in, what it had just begun goes back to the pool."""
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=2), tmp_path)
        model = toy.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
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


def test_asked_to_stop(tmp_path: Path) -> None:
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

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(), tmp_path)
        assert run.worker("a", on_step=stop).inner_step == 2
        assert run.told("a").state == "left"
        run.worker("b", on_step=note)
        info = run.final()
        assert info.state_digest == run.told("b").state_digest
        assert info.round == info.rounds == 4
        assert info.tokens == 3 * toy.STEPS * info.spec.unit_tokens
        assert min(units) == toy.STEPS + 2
    assert seen == [(2, 7), (2, 8), (2, 9), (3, 10), (3, 11), (4, 12)], "after each step"


def test_a_newcomer_recovers_from_checkpoint_and_deltas(tmp_path: Path) -> None:
    def stop(diloco: DiLoCo) -> None:
        if diloco.round == 5:
            diloco.client.stop.set()

    rounds = toy.spec(rounds=7, checkpoints="every_rounds = 3\nkeep = 1")
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, rounds, tmp_path)
        run.worker("a", on_step=stop)
        run.worker("b")
        assert run.final().state_digest == run.told("b").state_digest


def test_a_fragment_is_gathered_while_those_before_it_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here not before the coordinator has them: who gathers all of it first waits for ever."""
    gather, gathered = Fragments.pseudo_gradient, []

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(), tmp_path)

        def after_the_last(fragments: Fragments, p: int, *state: Any) -> torch.Tensor:
            opening = coordinator.live("toy").open
            assert opening is not None
            wait_until(lambda: all(each.contributed for each in opening.fragments[:p]))
            gathered.append(p)
            return gather(fragments, p, *state)

        monkeypatch.setattr(Fragments, "pseudo_gradient", after_the_last)
        run.worker("a", state_dir=tmp_path / "state")
        run.final()
    assert gathered == 3 * [0, 1, 2]


def test_diverged_training_sends_nothing(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(), tmp_path)
        with pytest.raises(CodecError, match="round 0: the training has diverged"):
            run.worker("a", lr=lambda diloco: 1e35)
        assert run.told("a").contributions == 0


def test_outside_of_with_it_says_what_is_missing(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(), tmp_path)
        model = toy.make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        diloco = run.connect(model, optimizer)
        with pytest.raises(RuntimeError, match="DiLoCo is a context manager"):
            next(diloco.units())
        with diloco:
            assert next(diloco.units()) == 0


def test_a_refusal_reaches_the_caller(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(), tmp_path)
        other = torch.nn.Linear(3, 3)
        run.worker("a", on_step=lambda diloco: diloco.client.stop.set())
        with open_http(coordinator.url) as http:
            client = Client(http, "toy", run.token)
            optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            with (
                pytest.raises(Problem, match="model-mismatch"),
                DiLoCo(other, optimizer, client=client, run=client.run_detail(), name="b"),
            ):
                pass


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_a_worker_may_begin_and_end_while_an_optimizer_of_another_thread_steps(tmp_path: Path, register: Any) -> None:
    """Torch iterates over its global hooks meanwhile. Here the step itself waits for another worker's whole life."""
    lived, parameter = list[DiLoCo](), nn.Parameter(torch.ones(1))
    stepping = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(1)
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=1), tmp_path)

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
