"""Units for a loop or a DataLoader: whatever is loaded ahead, every unit is trained on once, and no sync is inside the loader."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from protocol.errors import Problem
from protocol.messages import Action, Assignment
from protocol.spec.run import parse_spec
from tests.support.waiting import wait_until
from tests.worker import toy
from tests.worker.toy import MakeToy, Toy, at_once
from worker.diloco import DiLoCo
from worker.errors import ModelError
from worker.ranks import Ranks
from worker.rounds.training import InnerSteps
from worker.script.loader import UnitSampler

pytestmark = pytest.mark.slow

BATCH, ROUNDS = 4, 3
ROWS = BATCH * toy.STEPS * ROUNDS  # what one worker trains on


class Rows(Dataset[tuple[int, Tensor]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, Tensor]:
        return row, torch.randn(20, generator=torch.Generator().manual_seed(row))


def spec(**options: Any) -> str:
    return toy.spec(rounds=options.pop("rounds", ROUNDS), inner=f"batch_size = {BATCH}", **options)


def train(
    run: Toy, name: str, *, micro_batch: int | None = None, skipped: tuple[int, ...] = (), **loading: Any
) -> tuple[list[int], DiLoCo]:
    """Train as worker `name` by a DataLoader, passing the steps `skipped` over; the rows in order, and the DiLoCo."""
    model, rows, steps = toy.make_model(), list[int](), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = 1 if micro_batch is None else BATCH // micro_batch
    with run.connect(model, optimizer, name=name) as diloco:
        sampler = diloco.unit_sampler(Rows(), micro_batch)
        loader = DataLoader(Rows(), batch_sampler=sampler, **loading)
        while not diloco.finished:
            for number, (taken, x) in enumerate(loader):
                rows += taken.tolist()
                loss = model(x).square().mean() / batches
                loss.backward()
                diloco.report_loss(loss)
                if (number + 1) % batches == 0:
                    if steps not in skipped:
                        optimizer.step()
                    optimizer.zero_grad()
                    steps += 1
    return rows, diloco


class Fewer(Rows):
    def __len__(self) -> int:
        return ROWS - 1


def test_a_data_set_of_another_length_is_refused_before_it_is_trained_on(toy_run: MakeToy) -> None:
    """Data sets of 4000 and 3000 rows were once taken for the same: 22 of 192 rows were trained on twice."""
    run = toy_run(spec())
    model, other = toy.make_model(), toy.make_model()
    with run.connect(model, torch.optim.AdamW(model.parameters()), name="a") as a:
        a.unit_sampler(Rows())
        a.unit_sampler(Fewer())  # a second one, to evaluate on, is not compared
        with run.connect(other, torch.optim.AdamW(other.parameters()), name="b") as b:
            with pytest.raises(Problem, match=f"b has {ROWS - 1} rows, that of a {ROWS}") as refused:
                b.batches(DataLoader(Fewer(), batch_size=BATCH)).__next__()
            assert refused.value.slug == "data-mismatch"
        other = toy.make_model()
        late = run.connect(other, torch.optim.AdamW(other.parameters()), name="c")
        late.unit_sampler(Fewer())
        with pytest.raises(Problem, match="data set"), late:
            pass


LOADINGS: dict[str, dict[str, Any]] = {
    "in the loop": {},
    "in processes": {"num_workers": 2, "prefetch_factor": 8},
    "in processes that stay": {"num_workers": 1, "persistent_workers": True},
}


@pytest.mark.parametrize(
    ("loading", "micro_batch"), [("in the loop", 2), ("in processes", None), ("in processes that stay", 2)]
)
def test_an_epoch_has_every_row_once(toy_run: MakeToy, loading: str, micro_batch: int | None) -> None:
    run = toy_run(spec())
    rows, diloco = train(run, "a", micro_batch=micro_batch, **LOADINGS[loading])
    info = run.final()
    assert sorted(rows) == list(range(ROWS))
    assert rows != sorted(rows)
    assert info.tokens == ROUNDS * toy.STEPS * info.spec.unit_tokens
    assert run.told("a").state_digest == info.state_digest
    assert diloco.inner_step == 0, "no step is left over"


def test_two_workers_share_an_epoch(toy_run: MakeToy) -> None:
    run = toy_run(spec(rounds=1, min_workers=2))
    taken = at_once({name: partial(train, run, name) for name in "ab"})
    info = run.final()
    assert len({*taken["a"][0], *taken["b"][0]}) == 2 * BATCH * toy.STEPS
    assert run.told("a").state_digest == run.told("b").state_digest == info.state_digest


def test_what_a_skipped_step_leaves_is_loaded_again_and_told(
    toy_run: MakeToy, caplog: pytest.LogCaptureFixture
) -> None:
    run = toy_run(spec(rounds=1))
    rows, _ = train(run, "a", skipped=(1,))
    info = run.final()
    assert rows[-BATCH:] == rows[-2 * BATCH : -BATCH]
    assert info.tokens == toy.STEPS * info.spec.unit_tokens
    assert f"1 of {toy.STEPS} units had no inner step" in caplog.text


def test_a_loop_without_a_step_ends_with_a_word(toy_run: MakeToy) -> None:
    run = toy_run(spec(rounds=1))
    with pytest.raises(ModelError, match="all 4 batches of a round were loaded, and the optimizer .* not stepped"):
        train(run, "a", skipped=tuple(range(toy.STEPS)))


def test_a_loop_that_steps_on_every_micro_batch_is_told(toy_run: MakeToy) -> None:
    model, optimizer = toy.model_and_optimizer(torch.optim.SGD, lr=0.1)
    run = toy_run(spec())
    with run.connect(model, optimizer) as diloco:
        loader = DataLoader(Rows(), batch_sampler=diloco.unit_sampler(Rows(), 2))
        for _, x in loader:
            model(x).sum().backward()
            optimizer.step()
        with pytest.raises(ModelError, match="8 inner steps were done on the 4 units .* once for every 2 batches"):
            next(iter(loader))


@pytest.mark.parametrize(
    ("rows", "micro_batch", "told"),
    [
        (BATCH - 1, None, r"the data set has 3 rows, but a unit of this run has 4, its inner\.batch_size"),
        (ROWS, 3, r"micro_batch = 3: a unit of this run has 4 rows"),
        (ROWS, 0, r"micro_batch = 0: a unit of this run has 4 rows"),
        (ROWS, 8, r"micro_batch = 8: a unit of this run has 4 rows"),
    ],
)
def test_sizes_that_do_not_suit_are_refused(toy_run: MakeToy, rows: int, micro_batch: int | None, told: str) -> None:
    model = toy.make_model()
    diloco = toy_run(spec()).connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=told):
        diloco.unit_sampler(range(rows), micro_batch)


def test_the_length_is_known_before_the_run_is_joined_and_is_what_is_left(toy_run: MakeToy) -> None:
    model, optimizer = toy.model_and_optimizer(torch.optim.SGD, lr=0.1)
    diloco = toy_run(spec(rounds=1)).connect(model, optimizer)
    sampler = diloco.unit_sampler(Rows(), 2)
    assert len(sampler) == 2 * toy.STEPS
    with diloco:
        for left in range(toy.STEPS, 0, -1):
            assert len(sampler) == 2 * left
            toy.step(diloco, model, optimizer, left)
        assert list(sampler) == [], "the run is over"


def test_units_that_a_loader_takes_ahead_are_refused(toy_run: MakeToy) -> None:
    model = toy.make_model()
    run = toy_run(spec())
    with run.connect(model, torch.optim.SGD(model.parameters(), lr=0.1)) as diloco:
        loader = DataLoader(Rows(), batch_sampler=([unit] for unit in diloco.units()), num_workers=1)
        with pytest.raises(RuntimeError, match=r"batch_sampler=diloco\.unit_sampler"):
            next(iter(loader))


def test_units_that_share_a_step_are_told(toy_run: MakeToy, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = toy.model_and_optimizer(torch.optim.SGD, lr=0.1)
    run = toy_run(spec(rounds=1))
    with run.connect(model, optimizer) as diloco:
        for number, unit in enumerate(diloco.units()):
            x, _ = toy.batch(unit)
            model(x).sum().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert "round 0: 2 inner steps on 4 units" in caplog.text


def test_several_processes_share_every_unit() -> None:
    """Each has its own rows of it, as many as the others, and all of them together those that one would have."""
    run, steps = parse_spec(spec()), InnerSteps(parse_spec(spec()))
    steps.begin(Assignment(action=Action.TRAIN, reason="", round=0, inner_steps=2, units=[[3, 5]]))

    def rows(ranks: Ranks, micro_batch: int | None) -> list[list[int]]:
        return list(UnitSampler(run, ROWS, micro_batch, steps, lambda: False, ranks))

    whole = rows(Ranks(), None)
    parts = [rows(Ranks(rank, 2), None) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*parts, strict=True)] == [sorted(unit) for unit in whole]
    assert [len(each) for each in parts[0] + parts[1]] == [BATCH // 2] * 4
    assert [row for each in rows(Ranks(1, 2), 1) for row in each] == [row for each in parts[1] for row in each]
    with pytest.raises(ValueError, match="which 3 processes cannot share"):
        rows(Ranks(0, 3), None)
    with pytest.raises(ValueError, match="2 of them for each of 2 processes, which is not a multiple"):
        rows(Ranks(0, 2), 4)


# --- a script's own DataLoader: diloco.batches(loader) -------------------------------------------------------------


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
def test_every_row_is_trained_on_once_as_the_loader_loads_it(toy_run: MakeToy, which: str) -> None:
    loader, model, rows = loaders()[which], toy.make_model(), list[int]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    values = data().tensors[1]
    run = toy_run(toy.spec(rounds=ROUNDS, inner=f"batch_size = {BATCH}"))
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
    toy_run: MakeToy, loader: Any, kind: type[Exception], said: str
) -> None:
    model = toy.make_model()
    run = toy_run(toy.spec(inner=f"batch_size = {BATCH}"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.raises(kind, match=said), run.connect(model, optimizer) as diloco:
        diloco.batches(loader)
    assert run.told("a").state == "left"


# --- the look-ahead: what upcoming() names is what units() gives next ----------------------------------------------


STEPS = 6


@contextmanager
def training(run: Toy) -> Iterator[tuple[DiLoCo, nn.Module, torch.optim.Optimizer]]:
    """A worker of the toy run, the only one, for a loop of the test's own."""
    model, optimizer = toy.model_and_optimizer()
    with run.connect(model, optimizer) as diloco:
        yield diloco, model, optimizer


def test_they_are_the_units_that_are_left_of_the_round(toy_run: MakeToy) -> None:
    units, named = [], []
    with training(toy_run(toy.spec(rounds=2, steps=STEPS))) as (diloco, model, optimizer):
        first = list(diloco.upcoming())
        for unit in diloco.units():
            units.append(unit)
            named.append(list(diloco.upcoming()))
            toy.step(diloco, model, optimizer, unit)
        assert list(diloco.upcoming()) == []
    assert units == list(range(2 * STEPS))
    assert first == units[:STEPS]
    for index in range(2 * STEPS):
        end_of_round = (index // STEPS + 1) * STEPS
        assert named[index] == units[index + 1 : end_of_round]


@pytest.mark.parametrize("sync", ["overlap = 2", 'overlap = "eager"', 'offsets = "spread"\noverlap = 2'])
def test_with_an_overlap_the_next_round_is_named_before_this_one_ends(toy_run: MakeToy, sync: str) -> None:
    units, named = [], {}
    with training(toy_run(toy.spec(rounds=3, steps=STEPS, sync=sync))) as (diloco, model, optimizer):
        for unit in diloco.units():
            units.append(unit)
            if diloco.inner_step == STEPS - 1 and diloco.round < 2:  # the last round has none after it
                wait_until(lambda: len(list(diloco.upcoming())) > 0)
                named[len(units)] = list(diloco.upcoming())
            toy.step(diloco, model, optimizer, unit)
    assert named == {start: units[start : start + STEPS] for start in (STEPS, 2 * STEPS)}


def test_a_worker_that_is_to_stop_has_none(toy_run: MakeToy) -> None:
    with training(toy_run(toy.spec(steps=STEPS))) as (diloco, model, optimizer):
        for unit in diloco.units():
            assert len(list(diloco.upcoming())) == STEPS - 1
            diloco.client.stop.set()
            assert list(diloco.upcoming()) == []
            toy.step(diloco, model, optimizer, unit)
