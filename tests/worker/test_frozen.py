"""Parameters that are not trained: their identity, and that workers with others are refused."""

from pathlib import Path

import pytest
import torch
from blake3 import blake3
from torch import nn

from protocol.errors import Problem
from tests.worker import toy
from tests.worker.toy import Toy
from worker.diloco import DiLoCo
from worker.errors import ModelError
from worker.export import load_checkpoint
from worker.link.client import Client, open_http
from worker.state.parameters import frozen_summary


def model(*, frozen: tuple[int, ...] = (0,), dtype: torch.dtype = torch.float32) -> nn.Module:
    made = toy.make_model()
    for index in frozen:
        made[index].requires_grad_(False)  # type: ignore[index]
        made[index].to(dtype)  # type: ignore[index]
    return made


def test_the_digest_is_of_names_shapes_and_values() -> None:
    first = model()
    named = {"0.weight": "32,20", "0.bias": "32"}
    expected = blake3()
    for name, shape in named.items():
        values = first.get_parameter(name).detach().numpy().astype("<f4").tobytes()
        expected.update(f"{name}\0{shape}\0".encode() + values)
    summary = frozen_summary(first)
    assert summary is not None
    assert summary.digest == expected.hexdigest()
    assert summary.elements == 32 * 20 + 32


def test_nothing_frozen_is_nothing_to_tell() -> None:
    assert frozen_summary(model(frozen=())) is None


def test_one_value_makes_another_digest_and_what_is_trained_does_not() -> None:
    one, same, other = model(), model(), model()
    with torch.no_grad():
        same.get_parameter("2.weight").add_(1)
        other.get_parameter("0.bias")[3] += 1e-6
    assert frozen_summary(one) == frozen_summary(same) != frozen_summary(other)


def test_where_they_are_held_and_in_what_does_not_matter() -> None:
    """A compiled model has `_orig_mod.` in its names, and a box may hold in bf16 what was saved in bf16."""
    rounded = model(dtype=torch.bfloat16)
    wide = model(dtype=torch.bfloat16).float()
    assert frozen_summary(rounded) == frozen_summary(wide) == frozen_summary(torch.compile(wide))  # type: ignore[arg-type]
    assert frozen_summary(wide) != frozen_summary(model())


def test_integers_are_taken_as_they_are() -> None:
    made = nn.Module()
    made.table = nn.Parameter(torch.tensor([[1, 2**40]]), requires_grad=False)
    values = (1).to_bytes(8, "little") + (2**40).to_bytes(8, "little")
    summary = frozen_summary(made)
    assert summary is not None
    assert summary.digest == blake3(b"table\x001,2\0" + values).hexdigest()


@pytest.mark.slow
def test_workers_with_other_frozen_parameters_are_refused(tmp_path: Path) -> None:
    """They trained on before, each towards another model, and the mean of that was nobody's."""

    def other() -> nn.Module:
        made = model()
        with torch.no_grad():
            made.get_parameter("0.weight")[0, 0] = 1
        return made

    def join_as_another(diloco: DiLoCo) -> None:
        if diloco.global_step == 1:
            with pytest.raises(Problem, match="frozen parameters .* are not those of the run toy"):
                run.worker("b", model=other)

    with toy.coordinator_thread(tmp_path / "coordinator") as running:
        run = Toy(running, toy.spec(rounds=2), tmp_path)
        trained = run.worker("a", model=model, on_step=join_as_another)
        assert torch.equal(trained.model.get_parameter("0.weight"), model().get_parameter("0.weight"))
        shown = run.final()
        assert shown.frozen == frozen_summary(model())
        assert shown.elements == 32
        with open_http(running.url) as http, pytest.raises(ModelError, match=r"here \(none\) are not those of the run"):
            load_checkpoint(Client(http, "toy", run.token), factories=(toy.FACTORY,))


def test_frozen_parameters_without_elements_have_no_digest() -> None:
    empty = nn.Module()
    empty.weight = nn.Parameter(torch.empty(0, 3), requires_grad=False)
    assert frozen_summary(empty) is None
