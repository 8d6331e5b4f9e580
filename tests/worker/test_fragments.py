"""Parameters to fragments and back."""

import pytest
import torch
from torch import nn

from protocol.fragments import Layout, plan_fragments
from worker.errors import ModelError
from worker.state.fragments import DenseFragments, tensor_specs


class Tied(nn.Module):
    """An embedding tied to the head, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 10)
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.norm = nn.BatchNorm1d(10)
        self.head = nn.Linear(10, 40, bias=False)
        self.head.weight = self.embedding.weight


def fragments_of(model: nn.Module, elements: int = 100) -> tuple[DenseFragments, Layout]:
    layout = plan_fragments(tensor_specs(model), elements)
    return DenseFragments(model, layout), layout


def test_tied_once_and_frozen_never() -> None:
    specs = tensor_specs(Tied())
    assert [(spec.name, spec.shape) for spec in specs] == [
        ("embedding.weight", [40, 10]),
        ("norm.weight", [10]),
        ("norm.bias", [10]),
    ]


def test_gather_and_scatter() -> None:
    model = Tied()
    fragments, layout = fragments_of(model)
    assert len(fragments) == 5
    parts = [fragments.gather(p) for p in range(5)]
    assert [len(part) for part in parts] == layout.elements
    expected = torch.cat([model.embedding.weight.flatten(), model.norm.weight, model.norm.bias]).detach()
    assert torch.equal(torch.cat(parts), expected)
    for p, part in enumerate(parts):
        fragments.scatter(p, part + 1)
    assert torch.equal(torch.cat([fragments.gather(p) for p in range(5)]), expected + 1)
    assert torch.equal(model.head.weight, model.embedding.weight)


def test_parameters_with_gaps_in_memory() -> None:
    model = nn.Conv2d(4, 6, 3)
    model.weight = nn.Parameter(model.weight.detach().contiguous(memory_format=torch.channels_last))
    assert not model.weight.is_contiguous()
    fragments, layout = fragments_of(model)
    values = [torch.arange(n, dtype=torch.float32) + p for p, n in enumerate(layout.elements)]
    for p, value in enumerate(values):
        fragments.scatter(p, value)
        assert torch.equal(fragments.gather(p), value)
    assert not model.weight.is_contiguous()


def test_rounding_of_a_bf16_model_is_no_gradient() -> None:
    model = nn.Linear(20, 20).to(torch.bfloat16)
    fragments, layout = fragments_of(model)
    for p, n in enumerate(layout.elements):
        theta = torch.randn(n)
        fragments.rebase(p, theta, None)
        assert torch.count_nonzero(fragments.pseudo_gradient(p, theta)) == 0


def test_pseudo_gradient_descends() -> None:
    model = nn.Linear(3, 1, bias=False)
    fragments, _ = fragments_of(model)
    theta = torch.tensor([1.0, 2.0, 3.0])
    fragments.scatter(0, torch.tensor([0.5, 2.0, 4.0]))
    assert fragments.pseudo_gradient(0, theta).tolist() == [0.5, 0.0, -1.0]


def test_rebase_keeps_unaveraged_progress() -> None:
    model = nn.Linear(3, 1, bias=False)
    fragments, _ = fragments_of(model)
    carry = torch.tensor([0.5, 0.0, -1.0])
    fragments.rebase(0, torch.tensor([10.0, 20.0, 30.0]), carry)
    assert fragments.gather(0).tolist() == [9.5, 20.0, 31.0]
    assert fragments.pseudo_gradient(0, torch.tensor([10.0, 20.0, 30.0]), carry).tolist() == carry.tolist()


def test_a_bf16_model_forgets_nothing_of_what_is_carried() -> None:
    """The carried progress is smaller than bf16 can add to θ, round after round; it is in the next contribution all the
    same, and bit for bit."""
    model = nn.Linear(20, 20).to(torch.bfloat16)
    fragments, layout = fragments_of(model)
    for p, n in enumerate(layout.elements):
        carried = torch.randn(n) * 1e-5
        for _ in range(3):
            theta = torch.randn(n)
            fragments.rebase(p, theta, carried)
            assert torch.equal(fragments.pseudo_gradient(p, theta, carried), carried)


def test_models_that_cannot_be_averaged() -> None:
    with pytest.raises(ModelError, match="no trainable parameters"):
        tensor_specs(nn.ReLU())
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ModelError, match=r"weight is torch\.complex64"):
        tensor_specs(model)
