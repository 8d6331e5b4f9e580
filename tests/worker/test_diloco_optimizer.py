"""DiLoCo written as an optimizer: the same worker, and what the script says of the run is the run's."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from outerstep import DiLoCoOptimizer
from tests.worker import toy
from tests.worker.toy import Toy, at_once, coordinator_thread

pytestmark = pytest.mark.slow

BATCH, ROUNDS = 4, 3
TOTAL = ROUNDS * toy.STEPS
OUTER = partial(SGD, lr=1.0, momentum=0.9, nesterov=True)  # as toy.spec has it


def spec(**options: Any) -> str:
    return toy.spec(rounds=ROUNDS, inner=f"batch_size = {BATCH}", **options)


def make(run: Toy, model: nn.Module, /, *, name: str = "a", **changes: Any) -> DiLoCoOptimizer:
    given: dict[str, Any] = {
        "params": model.named_parameters(),
        "batch_size": BATCH,
        "num_inner_steps": toy.STEPS,
        "inner_optimizer": partial(AdamW, lr=0.01),
        "outer_optimizer": OUTER,
        "run": "toy",
        "url": run.coordinator.url,
        "token": run.token,
        "name": name,
        "state_dir": None,
    }
    return DiLoCoOptimizer(**given | changes)


def train(run: Toy, name: str, model: nn.Module, stop: Callable[[DiLoCoOptimizer, int], None] = lambda *_: None) -> int:
    """A loop that knows nothing of units; the steps that it took."""
    optimizer = make(run, model, name=name)
    generator, steps = torch.Generator().manual_seed(optimizer.diloco.data_seed), 0
    while not optimizer.finished:
        model(torch.randn(BATCH, 20, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        stop(optimizer, steps)
    return steps


def test_it_shares_a_run_with_workers_that_are_written_otherwise(tmp_path: Path) -> None:
    model = toy.make_model()
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(min_workers=2), tmp_path)
        done = at_once({"a": lambda: train(run, "a", model), "b": lambda: run.worker("b")})
        info = run.final()
        digests = {run.told(name).state_digest for name in "ab"}
    assert done["a"] == TOTAL
    assert digests == {info.state_digest}


def test_asked_to_stop_it_hands_in_and_ends(tmp_path: Path) -> None:
    def stop(optimizer: DiLoCoOptimizer, steps: int) -> None:
        if steps == 1:
            optimizer.diloco.client.stop.set()

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(), tmp_path)
        assert train(run, "a", toy.make_model(), stop) == 1
        assert run.told("a").state == "left"
        assert run.told("a").tokens == run.info().spec.unit_tokens


def test_a_loop_that_ends_early_leaves(tmp_path: Path) -> None:
    model = toy.make_model()
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(), tmp_path)
        with make(run, model) as optimizer:
            model(torch.randn(BATCH, 20)).square().mean().backward()
            optimizer.step()
        assert run.told("a").state == "left"
        assert run.told("a").tokens == run.info().spec.unit_tokens
        before = [each.clone() for each in model.parameters()]
        with pytest.raises(RuntimeError, match="this worker has left the run"):
            optimizer.step()
        optimizer.close()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_its_schedule_follows_the_run_and_all_else_is_the_inner_optimizer_s(tmp_path: Path) -> None:
    model, rates = toy.make_model(), list[float]()
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(), tmp_path)
        optimizer = make(run, model, scheduler=lambda inner: LambdaLR(inner, lambda step: 1 - step / TOTAL))
        optimizer.register_step_post_hook(lambda inner, *_: rates.append(inner.param_groups[0]["lr"]))
        scaler = torch.amp.GradScaler("cpu")
        while not optimizer.finished:
            scaler.scale(model(torch.randn(BATCH, 20)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert optimizer.param_groups is optimizer.inner_optimizer.param_groups
        assert optimizer.state_dict()["state"].keys() == optimizer.inner_optimizer.state_dict()["state"].keys()
        assert run.final().state == "finished"
    assert rates == pytest.approx([0.01 * (1 - step / TOTAL) for step in range(TOTAL)])


@pytest.mark.parametrize("by_name", [False, True])
def test_a_step_through_a_scaler_as_opendiloco_has_it(tmp_path: Path, by_name: bool) -> None:
    """`optimizer.step(scaler)`, gradients unscaled and clipped before; a step that overflows is no inner step."""
    model, scaler = toy.make_model(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    inner, called, norms = AdamW(model.parameters(), lr=0.01), 0, list[float]()
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(), tmp_path)
        optimizer = make(run, model, inner_optimizer=inner)
        while not optimizer.finished:
            factor = float("inf") if called == 1 else 1.0
            scaler.scale(model(torch.ones(BATCH, 20)).square().mean() * factor).backward()
            scaler.unscale_(optimizer.inner_optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step(scaler=scaler, batch_size=BATCH) if by_name else optimizer.step(scaler)
            scaler.update()
            optimizer.zero_grad()
            called += 1
        assert run.final().state == "finished"
    assert called == TOTAL + 1
    assert max(norm for norm in norms if norm < float("inf")) < 10  # unscaled once


def test_a_step_that_cannot_be_taken_so_is_refused(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run, scaler = Toy(coordinator, spec(), tmp_path), torch.amp.GradScaler("cpu")
        with make(run, toy.make_model()) as optimizer:
            with pytest.raises(ValueError, match="closure or a scaler"):
                optimizer.step(lambda: 0.0, scaler=scaler)
            with pytest.raises(ValueError, match="batch_size = 5"):
                optimizer.step(batch_size=5)
            assert optimizer.diloco.inner_step == 0


def test_parameters_without_names_are_numbered(tmp_path: Path) -> None:
    model = toy.make_model()
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(), tmp_path)
        with make(run, model, params=model.parameters()):
            assert [each.name for each in coordinator.live("toy").model.layout.tensors] == ["0", "1", "2"]  # type: ignore[union-attr]


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "batch": ({"batch_size": 5}, ValueError, "batch_size = 5, but the run toy has inner.batch_size = 4"),
    "H": ({"num_inner_steps": 7}, ValueError, "num_inner_steps = 7, but the run toy has sync.inner_steps = 4"),
    "no momentum": (
        {"outer_optimizer": partial(SGD, lr=1.0)},
        ValueError,
        r"SGD\(lr=1.0, momentum=0, nesterov=False, .*takes its outer steps with SGD\(lr=1.0, momentum=0.9, nesterov=True",
    ),
    "another": ({"outer_optimizer": partial(AdamW, lr=1.0)}, ValueError, r"outer_optimizer is AdamW\(lr=1.0"),
    "dht": ({"dht": object(), "run": None, "run_id": "toy"}, TypeError, r"dht \(.*run_id \(give run\)"),
    "compression": ({"grad_compression": None}, TypeError, "sync.upload_codec"),
    "no run": ({"run": None}, TypeError, "run is missing"),
    "groups": ({"params": [{"params": []}]}, TypeError, "params has groups"),
    "nothing": ({"params": []}, ValueError, "params is empty"),
}


@pytest.mark.parametrize(("changes", "kind", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_the_run_has_otherwise_is_refused_before_it_is_joined(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(), tmp_path)
        with pytest.raises(kind, match=said):
            make(run, toy.make_model(), **changes)
        assert run.info().live_workers == 0
