"""What others than the run's optimizers write into the model: refused before it is sent, unless it is taken back."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from tests.worker import toy
from tests.worker.toy import Joined, MakeToy
from worker.errors import ModelError
from worker.state.parameters import trainable_parameters
from worker.state.writes import ForeignWrites

pytestmark = pytest.mark.slow

State = dict[str, Tensor]


def load(model: nn.Module, state: State) -> None:
    model.load_state_dict(state)


def copy_data(model: nn.Module, state: State) -> None:
    """As torch_ema does, which counts in no `_version`."""
    for name, parameter in model.named_parameters():
        parameter.data.copy_(state[name])


def set_data(model: nn.Module, state: State) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = state[name].clone()


def copy_without_gradient(model: nn.Module, state: State) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])


WRITES = [load, copy_data, set_data, copy_without_gradient]


def plain_step(model: nn.Module, optimizer: Optimizer, unit: int) -> None:
    """A step whose loss nobody reports."""
    x, y = toy.batch(unit)
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def other_than(model: nn.Module) -> State:
    return {name: value * 1.01 for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("write", "steps_before"), [(load, 0), *((write, 2) for write in WRITES)])
def test_weights_that_are_left_in_are_refused_at_the_next_step(
    joined: Joined, write: Callable[[nn.Module, State], None], steps_before: int
) -> None:
    diloco, model, optimizer = joined
    for unit in range(steps_before):
        plain_step(model, optimizer, unit)
    write(model, other_than(model))
    with pytest.raises(ModelError, match=r"0\.weight for one.*checkpoint.*EMA"):
        plain_step(model, optimizer, steps_before)
    assert diloco.inner_step == steps_before


@pytest.mark.parametrize("write", WRITES)
def test_weights_that_are_swapped_out_and_back_may_be_anywhere(
    joined: Joined, write: Callable[[nn.Module, State], None]
) -> None:
    diloco, model, optimizer = joined
    for unit in diloco.units():
        x, y = toy.batch(unit)
        for report in (True, False):
            own = copy.deepcopy(model.state_dict())
            write(model, other_than(model))
            write(model, own)
            loss = nn.functional.mse_loss(model(x), y)
            if report:
                loss.backward()
                diloco.report_loss(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert diloco.finished


def test_an_average_of_the_weights_is_evaluated_within_a_block(joined: Joined) -> None:
    diloco, model, optimizer = joined
    average = AveragedModel(model)
    for unit in diloco.units():
        toy.step(diloco, model, optimizer, unit)
        average.update_parameters(model)
        own = [parameter.clone() for parameter in model.parameters()]
        named = dict(average.module.named_parameters())
        for given in (average, named, list(named.values())):
            with diloco.weights(given):
                assert all(map(torch.equal, model.parameters(), average.module.parameters()))
        assert all(map(torch.equal, model.parameters(), own))
    assert diloco.finished


def test_a_step_on_borrowed_weights_is_refused(joined: Joined) -> None:
    diloco, model, optimizer = joined
    with diloco.weights(other_than(model)), pytest.raises(RuntimeError, match="within `with diloco.weights"):
        optimizer.step()
    with pytest.raises(ValueError, match="lack 0.weight"), diloco.weights({"weight": torch.zeros(1)}):
        pass
    with pytest.raises(ValueError, match="of shape|has shape"), diloco.weights([torch.zeros(1)] * 3):
        pass


def test_of_weights_that_are_left_in_at_the_end_nothing_is_handed_in(
    toy_run: MakeToy, caplog: pytest.LogCaptureFixture
) -> None:
    run = toy_run(toy.spec(rounds=1))
    model, optimizer = toy.model_and_optimizer(torch.optim.SGD, lr=0.1)
    with run.connect(model, optimizer) as diloco:
        toy.step(diloco, model, optimizer, 0)
        copy_data(model, other_than(model))
    assert run.told("a").tokens == 0
    assert "not contributed" in caplog.text


def stepped(model: nn.Module, optimizer: Optimizer, writes: ForeignWrites) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    writes.before_step()
    optimizer.step()
    writes.after_step()


MODELS: dict[str, Callable[[], Any]] = {
    "fp32": toy.make_model,
    "bf16": lambda: toy.make_model().bfloat16(),
    "of two dtypes": lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 70).double()),
    "channels last": lambda: nn.Conv2d(3, 8, 5).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "compiled": lambda: torch.compile(toy.make_model(), backend="eager"),
}


@pytest.mark.parametrize(
    ("name", "options"), [("fp32", {}), ("fp32", {"foreach": True}), *((name, {"fused": True}) for name in MODELS)]
)
def test_steps_of_its_own_are_no_writes_of_others(name: str, options: dict[str, Any]) -> None:
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    writes = ForeignWrites(model, [optimizer])
    for _ in range(3):
        stepped(model, optimizer, writes)
    last = list(trainable_parameters(model).values())[-1]
    last.data.mul_(2)
    assert writes.changed() is not None
    last.data.div_(2)
    assert writes.changed() is None


def test_a_model_that_has_diverged_was_not_written_to() -> None:
    model = toy.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=float("nan"))
    writes = ForeignWrites(model, [optimizer])
    for _ in range(2):
        stepped(model, optimizer, writes)


class Perturbed(Optimizer):
    """As SAM is written: an optimizer around another one, which moves the parameters away for a while."""

    def __init__(self, parameters: Any, base: type[Optimizer], **options: Any) -> None:
        super().__init__(parameters, options)
        self.base = base(self.param_groups, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [each for group in self.param_groups for each in group["params"]]
        kept = [each.data.clone() for each in parameters]
        for each in parameters:
            each.add_(0.1)
        for each, before in zip(parameters, kept, strict=True):
            each.data = before
        self.base.step()


@pytest.mark.parametrize("gives_base", [True, False])
def test_an_optimizer_around_another_one_is_no_other(toy_run: MakeToy, gives_base: bool) -> None:
    run = toy_run(toy.spec(rounds=1))
    model = toy.make_model()
    optimizer = Perturbed(model.parameters(), torch.optim.SGD, lr=0.01)
    with run.connect(model, optimizer.base if gives_base else optimizer) as diloco:
        for unit in diloco.units():
            toy.step(diloco, model, optimizer, unit)
    assert diloco.finished
