"""Gradients and moments in host memory: the same training, whatever is clipped, split, repeated or resumed."""

from mmap import PAGESIZE
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from protocol.spec.run import RunSpec, parse_spec
from worker.inner.compact import Held
from worker.inner.loss import Loss
from worker.inner.micro_batch import MicroBatches
from worker.inner.offload import HostGradients, page_locked
from worker.inner.optimizers import build_inner_optimizers
from worker.inner.step import InnerStep
from worker.models.building import build_model
from worker.state.optimizer_state import load_local_state, local_state

CPU = torch.device("cpu")
ROWS, LENGTH = 4, 32


def spec(inner: str = "") -> RunSpec:
    text = f'name = "r"\nmodel = {{ preset = "tiny", vocab_size = 64 }}\n[sync]\nrounds = 1\n[inner]\n{inner}'
    return parse_spec(text)


def batch(step: int) -> Tensor:
    return torch.randint(0, 64, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def test_pages_are_locked_for_as_long_as_the_memory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stayed locked, so that later copies to a GPU from the same memory failed."""
    locked: dict[int, int] = {}

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
            locked[address] = size
            return 0

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            del locked[address]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    sizes = [1, PAGESIZE // 2, 3 * PAGESIZE]
    held = [page_locked(n, torch.bfloat16, torch.device("cuda")) for n in sizes]
    assert [(len(each), each.dtype, bool(each.any())) for each in held] == [(n, torch.bfloat16, False) for n in sizes]
    assert [locked[each.data_ptr()] // PAGESIZE for each in held] == [1, 1, 6]
    assert all(address % PAGESIZE == 0 for address in locked), "no page is another's as well"
    view = held.pop().view(3, -1)
    assert len(locked) == 3
    held.clear()
    assert list(locked) == [view.data_ptr()]
    del view
    assert not locked


class Trained:
    """A tiny model that trains with its gradients in host memory, or as usual."""

    def __init__(
        self, run: RunSpec, held: Held, rows: int, *, offload: bool, bf16: bool = False, searches: bool = False
    ) -> None:
        self.model = build_model(run, CPU)
        if bf16:
            self.model.bfloat16()
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.offloaded = HostGradients(trained) if offload else None
        self.optimizers: list[Optimizer] = build_inner_optimizers(self.model, run.inner, held, self.offloaded)
        loss, sizes = Loss(self.model, "bf16" if bf16 else "fp32"), MicroBatches(None if searches else rows, rows)
        self.step = InnerStep(loss, self.optimizers, sizes, inner=run.inner, offloaded=self.offloaded)

    def steps(self, first: int, last: int) -> "Trained":
        for number in range(first, last):
            torch.manual_seed(number)
            self.step.gradient(batch(number))
            self.step.apply()
        return self

    @property
    def parameters(self) -> list[Tensor]:
        return [each.detach() for each in self.model.parameters()]


def assert_equal(one: Trained, other: Trained) -> None:
    for a, b in zip(one.parameters, other.parameters, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("held", ["fp32", "8bit"])
@pytest.mark.parametrize("clip", ["1e-2", '"none"'])
@pytest.mark.parametrize("rows", [ROWS, 1])
def test_it_is_the_same_training_bit_for_bit(optimizer: str, held: Held, clip: str, rows: int) -> None:
    """Also if the norm is clipped to far below that of the gradients, and with several micro-batches."""
    run = spec(f'optimizer = "{optimizer}"\nlearning_rate = 0.01\nclip_norm = {clip}')
    plain, offloaded = (Trained(run, held, rows, offload=each).steps(0, 3) for each in (False, True))
    assert_equal(offloaded, plain)
    assert not torch.equal(plain.parameters[0], Trained(run, held, rows, offload=False).parameters[0])


def test_no_parameter_keeps_a_gradient_and_the_norm_is_that_of_all() -> None:
    run = spec()
    plain, offloaded = (Trained(run, "fp32", 2, offload=each) for each in (False, True))
    assert offloaded.offloaded is not None
    for each in (plain, offloaded):
        each.step.gradient(batch(0))
    assert all(each.grad is None for each in offloaded.model.parameters())
    expected = nn.utils.get_total_norm(each.grad for each in plain.model.parameters() if each.grad is not None)
    torch.testing.assert_close(offloaded.offloaded.clip(1.0), expected)


def test_a_batch_that_starts_again_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out in the second of two micro-batches; then there are four."""
    run = spec("learning_rate = 0.01")
    plain, offloaded = Trained(run, "fp32", 1, offload=False), Trained(run, "fp32", 2, offload=True, searches=True)
    forward, calls = offloaded.model.forward, 0

    def fails_once(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args, **options)

    monkeypatch.setattr(offloaded.model, "forward", fails_once)
    assert_equal(offloaded.steps(0, 2), plain.steps(0, 2))
    assert calls == 2 + 2 * ROWS


@pytest.mark.slow
@pytest.mark.parametrize("held", ["fp32", "bf16", "8bit"])
def test_a_saved_state_resumes_exactly_on_a_box_that_offloads_and_on_one_that_does_not(held: Held) -> None:
    run = spec('optimizer = "adamw"\nlearning_rate = 0.01')
    undisturbed = Trained(run, held, 2, offload=True, bf16=held != "fp32").steps(0, 2)
    states = [local_state(each) for each in undisturbed.optimizers]
    assert all(each.device.type == "cpu" for each in states[0]["state"][0].values() if isinstance(each, Tensor))
    resumed = [Trained(run, held, 2, offload=each, bf16=held != "fp32") for each in (True, False)]
    for each in resumed:
        for a, b in zip(each.parameters, undisturbed.parameters, strict=True):
            a.copy_(b)
        for optimizer, state in zip(each.optimizers, states, strict=True):
            load_local_state(optimizer, state)
    undisturbed.steps(2, 4)
    for each in resumed:
        assert_equal(each.steps(2, 4), undisturbed)
