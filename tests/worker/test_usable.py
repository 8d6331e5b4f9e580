"""What people do wrong in a training loop of their own, each told at once instead of trained on in silence."""

import multiprocessing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.worker import toy
from tests.worker.toy import Joined, MakeToy, Toy, coordinator_thread
from worker.diloco import DiLoCo
from worker.errors import ModelError, StateDirBusy, Stopped
from worker.script.optimizers import usable_optimizers

pytestmark = pytest.mark.slow


class Wrapper(Optimizer):
    """As accelerate's: an Optimizer by name, without the hooks of one, around that which steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


def sgd(*modules: nn.Module) -> Optimizer:
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=0.1)


@pytest.mark.parametrize(("evaluate", "told"), [(lambda: 1.5, "evaluate returned float"), (1.5, "is of type float")])
def test_what_evaluate_returns_is_checked_before_the_first_step(toy_run: MakeToy, evaluate: Any, told: str) -> None:
    model = toy.make_model()
    run = toy_run()
    with pytest.raises(TypeError, match=told), run.connect(model, sgd(model), evaluate=evaluate):
        pytest.fail("it began to train")
    assert run.info().live_workers == 0


@pytest.mark.parametrize("warms_up", [True, False])
def test_a_late_loop_without_warmup_is_warned_once(
    toy_run: MakeToy, warms_up: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = toy_run(toy.spec(rounds=3, inner="joiner_warmup_steps = 3"))
    for name, until in (("a", toy.STEPS), ("b", 3 * toy.STEPS)):
        model, optimizer = toy.model_and_optimizer()
        with run.connect(model, optimizer, name=name) as diloco:
            for unit in toy.units_until(diloco, until):
                if warms_up:
                    optimizer.param_groups[0]["lr"] = 0.1 * diloco.warmup_scale
                toy.step(diloco, model, optimizer, unit)
    assert caplog.text.count("inner.joiner_warmup_steps = 3") == (0 if warms_up else 1)


def test_a_notebook_cell_that_runs_again_is_told_what_is_still_open(toy_run: MakeToy, tmp_path: Path) -> None:
    model, optimizer = toy.model_and_optimizer()
    run = toy_run()
    with run.connect(model, optimizer, state_dir=tmp_path / "a") as diloco:
        other = toy.make_model()
        with pytest.raises(StateDirBusy, match="already uses"):
            run.connect(other, sgd(other), state_dir=tmp_path / "a").__enter__()
        with pytest.raises(RuntimeError, match="has not left its run"):
            run.connect(model, optimizer).__enter__()
        assert not diloco.finished
    with pytest.raises(RuntimeError, match="has joined the run before"):
        diloco.__enter__()
    with run.connect(model, optimizer, state_dir=tmp_path / "a") as again:
        assert again.has_joined


def test_a_double_precision_model_is_refused_before_the_run_is_joined(toy_run: MakeToy) -> None:
    """It failed at the first sync."""
    model = toy.make_model().double()
    run = toy_run()
    with pytest.raises(ModelError, match=r"parameter 0\.weight is torch\.float64.*model\.float\(\)"):
        run.connect(model, sgd(model))
    assert run.info().live_workers == 0


def test_a_script_may_set_a_default_device(toy_run: MakeToy, tmp_path: Path) -> None:
    """Memory that the worker allocates stays in host memory. The meta device shows any that does not. `state_dir` is a
    string, as scripts have it."""
    run = toy_run(toy.spec(rounds=2, upload="2bit"))
    for until in (toy.STEPS, 2 * toy.STEPS):  # the second process continues from the first one's snapshot
        model, optimizer = toy.model_and_optimizer()
        with torch.device("meta"), run.connect(model, optimizer, state_dir=str(tmp_path / "a")) as diloco:
            for unit in toy.units_until(diloco, until):
                with torch.device("cpu"):
                    toy.step(diloco, model, optimizer, unit)
    assert run.final().state == "finished"


def test_a_script_may_set_a_default_dtype(tmp_path: Path) -> None:
    """It is set for all threads, by transformers too while it loads a model. The state is in fp32 whatever it is; the
    second process continues from the first one's snapshot."""
    digests = set()
    for dtype in (torch.float32, torch.bfloat16):
        place = tmp_path / str(dtype)
        with coordinator_thread(place / "coordinator") as coordinator:
            run = Toy(coordinator, toy.spec(rounds=2, upload="2bit"), tmp_path)
            for until in (toy.STEPS, 2 * toy.STEPS):
                model, optimizer = toy.model_and_optimizer()
                try:
                    torch.set_default_dtype(dtype)
                    with run.connect(model, optimizer, state_dir=place / "a") as diloco:
                        for unit in toy.units_until(diloco, until):
                            toy.step(diloco, model, optimizer, unit)
                finally:
                    torch.set_default_dtype(torch.float32)
            digests.add(run.final().state_digest)
    assert len(digests) == 1


def test_of_a_wrapper_what_it_wraps_is_taken() -> None:
    model, optimizer = toy.model_and_optimizer()
    assert usable_optimizers(model, Wrapper(Wrapper(optimizer))) == [optimizer]


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        (lambda model: [], ValueError, "at least one optimizer"),
        (lambda model: [sgd(model)] * 2, ValueError, "one optimizer twice"),
        (
            lambda model: torch.optim.lr_scheduler.StepLR(sgd(model), 1).state_dict,
            TypeError,
            "no torch.optim.Optimizer",
        ),
        (lambda model: sgd(toy.make_model()), ModelError, "SGD trains none of the model's parameters"),
        (lambda model: sgd(model, nn.Linear(2, 3)), ModelError, r"trains 2 parameters .* of shape \[3, 2\]"),
    ],
)
def test_what_does_not_train_the_model_is_refused_before_the_run_is_joined(
    toy_run: MakeToy, given: Callable[[nn.Module], Any], error: type[Exception], told: str
) -> None:
    model = toy.make_model()
    run = toy_run()
    with pytest.raises(error, match=told):
        run.connect(model, given(model))
    assert run.info().live_workers == 0


def test_parameters_that_no_optimizer_has_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = toy.make_model()
    usable_optimizers(model, sgd(model.get_submodule("0")))
    assert "1 trainable parameters, such as 2.weight, are in none of the optimizers" in caplog.text


def test_frozen_parameters_in_an_optimizer_are_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    model = toy.make_model()
    model.get_submodule("0").requires_grad_(False)
    usable_optimizers(model, sgd(model))
    assert caplog.text == ""


def test_a_step_after_the_end_is_refused_and_changes_nothing(joined: Joined) -> None:
    diloco, model, optimizer = joined
    for unit in diloco.units():
        toy.step(diloco, model, optimizer, unit)
    assert diloco.finished
    ended = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match=r"the run is over for this worker.*`diloco.finished`"):
        toy.step(diloco, model, optimizer, 0)
    assert all(map(torch.equal, model.parameters(), ended))


def test_a_loop_that_does_not_hear_that_it_is_to_stop_is_ended_and_what_it_did_is_handed_in(toy_run: MakeToy) -> None:
    run = toy_run(toy.spec(rounds=1))
    model, optimizer = toy.model_and_optimizer()
    diloco = run.connect(model, optimizer)

    def loop() -> None:
        with diloco:
            for unit in range(toy.STEPS):
                if unit == 2:
                    diloco.client.stop.set()
                toy.step(diloco, model, optimizer, unit)

    with pytest.raises(Stopped, match="asked to stop"):
        loop()
    assert run.told("a").tokens == 3 * diloco.spec.unit_tokens
    assert run.told("a").state == "left"


@pytest.mark.parametrize(("takes_units", "given_steps_first"), [(True, True), (False, False)])
def test_the_steps_of_another_optimizer_are_noticed_at_the_first(
    joined: Joined, takes_units: bool, given_steps_first: bool
) -> None:
    """After a sync they would leave this worker with a model of its own."""
    diloco, model, optimizer = joined
    other = torch.optim.Adam(model.parameters())
    unit = next(diloco.units()) if takes_units else 0
    if given_steps_first:
        toy.step(diloco, model, optimizer, unit)
    with pytest.raises(ModelError, match=r"Adam, an optimizer that DiLoCo was not given.*0\.weight"):
        toy.step(diloco, model, other, unit)


def test_a_step_before_the_run_is_joined_is_refused(toy_run: MakeToy) -> None:
    model, optimizer = toy.model_and_optimizer()
    run = toy_run(toy.spec(rounds=1))
    run.connect(model, optimizer)
    diloco = run.connect(model, optimizer)  # as where the cell of a notebook is run again
    with pytest.raises(RuntimeError, match="the run was not joined"):
        optimizer.step()
    with diloco:
        optimizer.step()
    optimizer.step()


def test_a_second_step_for_one_unit_is_refused(joined: Joined) -> None:
    diloco, model, optimizer = joined
    for unit in diloco.units():
        toy.step(diloco, model, optimizer, unit)
        if not diloco.finished:
            with pytest.raises(RuntimeError, match="a second time for one unit"):
                toy.step(diloco, model, optimizer, unit)
    assert diloco.finished


@pytest.mark.parametrize("takes_units", [True, False])
def test_a_loss_that_is_reported_within_the_step_is_no_fault(joined: Joined, takes_units: bool) -> None:
    """Lightning's loops, and those of LBFGS, do everything in a closure."""
    diloco, model, optimizer = joined
    units = diloco.units() if takes_units else iter(range(toy.STEPS))

    def closure(unit: int) -> float:
        optimizer.zero_grad()
        x, y = toy.batch(unit)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        diloco.report_loss(loss)
        return loss.item()

    for unit in units:
        optimizer.step(partial(closure, unit))
    assert diloco.finished


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "dtype": lambda model: model.half().float().half(),
    "replaced": lambda model: setattr(model, "0", nn.Linear(20, 32)),
    "frozen": lambda model: model.get_submodule("0").requires_grad_(False),
}


@pytest.mark.parametrize(
    ("change", "sync", "steps"),
    [("dtype", "", toy.STEPS), ("replaced", 'offsets = "spread"', toy.STEPS), ("frozen", "overlap = 1", 1)],
)
def test_a_model_that_is_changed_under_way_is_refused_before_anything_of_it_is_sent(
    toy_run: MakeToy, change: str, sync: str, steps: int
) -> None:
    model, optimizer = toy.model_and_optimizer()
    run = toy_run(toy.spec(rounds=1, sync=sync))

    def loop() -> None:
        with run.connect(model, optimizer):
            CHANGES[change](model)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            for _ in range(steps):
                optimizer.step()

    with pytest.raises(ModelError, match=r"changed after the run was joined, 0\.\w+ for one"):
        loop()
    assert run.told("a").state == "left"
    assert run.told("a").upload_bytes == 0


def test_every_worker_and_round_has_a_data_seed_of_its_own(toy_run: MakeToy) -> None:
    seeds: dict[int, set[tuple[str, int]]] = {}

    def note(diloco: DiLoCo) -> None:
        if diloco.inner_step:  # after a round's last step the next one is there
            seeds.setdefault(diloco.data_seed, set()).add((diloco.name, diloco.round))

    run = toy_run(toy.spec(rounds=2, min_workers=2))
    run.workers(["a", "b"], a={"on_step": note}, b={"on_step": note})
    assert sorted(seeds.values(), key=min) == [{("a", 0)}, {("a", 1)}, {("b", 0)}, {("b", 1)}]


@pytest.mark.parametrize(
    ("seeds", "told"), [(lambda diloco: diloco.round, [["a", "b"]]), (lambda diloco: diloco.data_seed, [])]
)
def test_workers_that_draw_the_same_batches_are_told_of(
    toy_run: MakeToy, seeds: Callable[[DiLoCo], int], told: list[list[str]]
) -> None:
    """Nothing else differs between a run of two and a run of one that counts twice."""
    run = toy_run(toy.spec(rounds=2, min_workers=2))

    def work(name: str) -> None:
        model, optimizer = toy.model_and_optimizer()
        with run.connect(model, optimizer, name=name) as diloco:
            while not diloco.finished:
                toy.step(diloco, model, optimizer, seeds(diloco) + diloco.inner_step)

    toy.at_once({name: partial(work, name) for name in "ab"})
    assert [event["data"]["workers"] for event in run.events() if event["kind"] == "equal"] == told


def test_another_process_is_refused_and_this_one_goes_on(joined: Joined) -> None:
    """A DataLoader's workers are forks, which have this process's connections."""
    diloco, model, optimizer = joined
    units = diloco.units()
    toy.step(diloco, model, optimizer, next(units))
    context = multiprocessing.get_context("fork")
    told: Any = context.SimpleQueue()

    def elsewhere() -> None:
        try:
            next(diloco.units())
        except RuntimeError as error:
            told.put(str(error))

    process = context.Process(target=elsewhere)
    process.start()
    assert "and this is another one, such as a DataLoader's worker" in told.get()
    process.join()
    for unit in units:
        toy.step(diloco, model, optimizer, unit)
    assert diloco.finished
