"""A script's own DataLoader over the run's units: `diloco.batches(loader)`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread

pytestmark = pytest.mark.slow

BATCH, ROUNDS = 4, 3
ROWS = BATCH * toy.STEPS * ROUNDS


def data() -> TensorDataset:
    return TensorDataset(torch.arange(ROWS), torch.randn(ROWS, 20, generator=torch.Generator().manual_seed(0)))


def doubled(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    numbers, values = zip(*rows, strict=True)
    return torch.stack(numbers), 2 * torch.stack(values)


def loaders() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(DataLoader(data(), batch_size=BATCH, shuffle=True, collate_fn=doubled))
    return {
        "in the loop": DataLoader(data(), batch_size=BATCH, shuffle=True, collate_fn=doubled),
        "in processes": DataLoader(data(), batch_size=BATCH, collate_fn=doubled, num_workers=2, prefetch_factor=8),
        "accelerate's": prepared,
        "smaller batches": DataLoader(data(), batch_size=BATCH // 2, shuffle=True, collate_fn=doubled),
    }


@pytest.mark.parametrize("which", ["in the loop", "in processes", "accelerate's", "smaller batches"])
def test_every_row_is_trained_on_once_as_the_loader_loads_it(tmp_path: Path, which: str) -> None:
    loader, model, rows = loaders()[which], toy.make_model(), list[int]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    values = data().tensors[1]
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=ROUNDS, inner=f"batch_size = {BATCH}"), tmp_path)
        with run.connect(model, optimizer) as diloco:
            for taken, x in diloco.batches(loader):
                assert torch.equal(x, 2 * values[taken])
                rows += taken.tolist()
                model(x).square().mean().backward()
                if len(rows) % BATCH == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        info = run.final()
        assert run.told("a").state_digest == info.state_digest
    assert sorted(rows) == list(range(ROWS))
    assert rows != sorted(rows)
    assert info.tokens == ROUNDS * toy.STEPS * info.spec.unit_tokens


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(8, 20))


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a list": ([1, 2], TypeError, "DataLoader, but this is list"),
    "a stream": (DataLoader(Stream(), batch_size=BATCH), TypeError, "of this loader, Stream, has no numbered rows"),
    "no batches": (DataLoader(data(), batch_size=None), ValueError, "has no batch_size"),
    "weighted": (
        DataLoader(data(), batch_size=BATCH, sampler=WeightedRandomSampler([1.0] * ROWS, ROWS)),
        ValueError,
        "order of its own, WeightedRandomSampler",
    ),
    "too large": (DataLoader(data(), batch_size=3), ValueError, "not a multiple of that"),
}


@pytest.mark.parametrize(("loader", "kind", "said"), WRONG.values(), ids=WRONG.keys())
def test_a_loader_that_cannot_load_units_is_refused(
    tmp_path: Path, loader: Any, kind: type[Exception], said: str
) -> None:
    model = toy.make_model()
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(inner=f"batch_size = {BATCH}"), tmp_path)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with pytest.raises(kind, match=said), run.connect(model, optimizer) as diloco:
            diloco.batches(loader)
        assert run.told("a").state == "left"
