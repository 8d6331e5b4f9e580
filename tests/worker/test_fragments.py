"""Parameters to fragments and back."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from protocol.fragments import Layout, plan_fragments
from worker.errors import ModelError
from worker.state.fragments import Fragments, host_copy
from worker.state.parameters import tensor_specs


class Tied(nn.Module):
    """An embedding tied to the head, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 10)
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.norm = nn.BatchNorm1d(10)
        self.head = nn.Linear(10, 40, bias=False)
        self.head.weight = self.embedding.weight


def fragments_of(model: nn.Module, elements: int = 100) -> tuple[Fragments, Layout]:
    layout = plan_fragments(tensor_specs(model), elements)
    return Fragments(model, layout), layout


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


def test_a_vector_is_rounded_to_what_a_model_of_two_dtypes_holds_of_it() -> None:
    model = nn.Sequential(nn.Linear(20, 20).to(torch.bfloat16), nn.Linear(20, 20))
    fragments, layout = fragments_of(model)
    for p, elements in enumerate(layout.elements):
        vector = torch.randn(elements)
        fragments.rebase(p, vector, None)
        torch.testing.assert_close(fragments.rounded(p, vector.clone()), fragments.gather(p), rtol=0, atol=0)


def test_models_that_cannot_be_averaged() -> None:
    with pytest.raises(ModelError, match="no trainable parameters"):
        tensor_specs(nn.ReLU())
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ModelError, match=r"weight is torch\.complex64"):
        tensor_specs(model)


def test_a_copy_is_of_any_kind_and_does_not_change_with_the_original() -> None:
    for original in (
        torch.tensor(3.5),
        torch.arange(6).reshape(2, 3).t(),
        torch.randn(4, 4, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.tensor([True, False]),
    ):
        expected = original.clone()
        copy = host_copy(original)
        assert (copy.dtype, copy.shape) == (original.dtype, original.shape)
        original.zero_()
        assert torch.equal(copy, expected)
        assert copy.is_contiguous()


# --- wrapped and sharded models -----------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process only."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = nn.Linear(3, 3)
        self.outer: nn.Module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def compiled(module: nn.Module) -> nn.Module:
    wrapped: Any = torch.compile(module)  # compiles nothing before its first use
    return wrapped


def with_compiled_parts() -> nn.Module:
    model, part = Plain(), nn.Sequential(compiled(nn.Linear(2, 3)), nn.Linear(3, 1))
    model.inner, model.outer = compiled(model.inner), compiled(part)
    return model


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "torch.compile": lambda: compiled(Plain()),
    "DDP": lambda: DistributedDataParallel(Plain()),
    "DataParallel": lambda: nn.DataParallel(Plain()),
    "DDP around torch.compile": lambda: DistributedDataParallel(compiled(Plain())),
    "torch.compile around DDP": lambda: compiled(DistributedDataParallel(Plain())),
    "parts within parts": with_compiled_parts,
    "everything": lambda: DistributedDataParallel(compiled(with_compiled_parts())),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_wrappers_change_no_name(wrapped: str) -> None:
    """They put `_orig_mod.` and `module.` into the names, so a compiled worker was refused with model-mismatch."""
    model = WRAPPED[wrapped]()
    assert [name for name, _ in model.named_parameters()] != [name for name, _ in Plain().named_parameters()]
    assert tensor_specs(model) == tensor_specs(Plain())
    fragments, layout = fragments_of(model, 10)
    for p, n in enumerate(layout.elements):
        fragments.scatter(p, torch.arange(n) + 100.0 * p)
    expected = Plain()
    same = Fragments(expected, layout)
    for p, n in enumerate(layout.elements):
        same.scatter(p, torch.arange(n) + 100.0 * p)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)  # where there is a GPU, DataParallel moves the model there


def test_a_name_of_the_users_own_stays() -> None:
    """Only what a wrapper puts there goes: a module may well be called `module`, whatever its name says."""
    model = nn.ModuleDict({"module": nn.ModuleDict({"_orig_mod": nn.Linear(2, 1, bias=False)})})
    assert [spec.name for spec in tensor_specs(model)] == ["module._orig_mod.weight"]
    assert [spec.name for spec in tensor_specs(nn.DataParallel(model))] == ["module._orig_mod.weight"]


def test_two_parameters_of_one_name() -> None:
    model = nn.DataParallel(nn.Linear(2, 1, bias=False))
    model.weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(ModelError, match=r"two parameters are called weight, one of them module\.weight"):
        tensor_specs(model)


@pytest.mark.usefixtures("alone")
def test_a_sharded_model_is_gathered_and_scattered() -> None:
    """Of one process, or of several (test_ranks.py); also after an evaluation, which leaves it gathered by itself."""
    model, mesh = Plain(), distributed.device_mesh.init_device_mesh("cpu", (1,))
    before = tensor_specs(model)
    expected = [fragments_of(model, 10)[0].gather(p) for p in range(3)]
    fully_shard(model.inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert tensor_specs(model) == before
    fragments, _ = fragments_of(model, 10)
    assert all(torch.equal(fragments.gather(p), each) for p, each in enumerate(expected))
    model.inner.unshard()  # type: ignore[operator]
    for p, each in enumerate(expected):
        fragments.scatter(p, each + 1)
    fragments.check()
    assert all(torch.equal(fragments.gather(p), each + 1) for p, each in enumerate(expected))
    model.inner.unshard()  # type: ignore[operator]
    whole: Any = model.inner.weight
    assert torch.equal(whole.flatten(), torch.cat(expected)[: whole.numel()] + 1)


@pytest.mark.usefixtures("alone")
def test_parameters_that_a_module_around_the_model_has_gathered_are_told() -> None:
    """An evaluation leaves them so, and the training went on with what they were before the sync."""
    model = Plain()
    around = nn.Sequential(model)
    fully_shard(around, mesh=distributed.device_mesh.init_device_mesh("cpu", (1,)))
    fragments, layout = fragments_of(model, 10)
    fragments.scatter(0, torch.zeros(layout.elements[0]))
    around.unshard()  # type: ignore[operator]
    with pytest.raises(ModelError, match=r"gathered parameters.*reshard\(\)"):
        fragments.scatter(0, torch.zeros(layout.elements[0]))


@pytest.mark.usefixtures("alone")
def test_columns_are_not_sharded() -> None:
    model = nn.Linear(4, 4)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))
    with pytest.raises(ModelError, match=r"parameter weight is sharded as S\(1\).* only its rows can be"):
        fragments_of(model)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("whole", [True, False])
def test_a_model_within_fully_sharded_data_parallel_is_refused(use_orig_params: bool, whole: bool) -> None:
    """Its shards were taken for whole parameters: one flat one, or the original ones, empty on most ranks."""
    model = Plain()
    options: dict[str, Any] = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    if whole:
        wrapped: nn.Module = FullyShardedDataParallel(model, **options)
    else:
        model.inner, wrapped = FullyShardedDataParallel(model.inner, **options), model
    with pytest.raises(ModelError, match=r"FullyShardedDataParallel, which hides its parameters"):
        tensor_specs(wrapped)


def test_a_flat_parameter_without_its_wrapper_is_refused() -> None:
    """As one has who takes the parameters out of FSDP's handles."""
    model = nn.Module()
    model.flat = FlatParameter(torch.zeros(10))
    with pytest.raises(
        ModelError, match=r"parameter flat is flattened \(a FlatParameter\), which has no shape of its own"
    ):
        tensor_specs(model)
