"""Units for a DataLoader: whatever it loads ahead, every unit is trained on once, and no sync is inside the loader."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from protocol.errors import Problem
from protocol.messages import Action, Assignment
from protocol.spec.run import parse_spec
from tests.worker import toy
from tests.worker.toy import Toy, at_once, coordinator_thread
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


def test_a_data_set_of_another_length_is_refused_before_it_is_trained_on(tmp_path: Path) -> None:
    """Data sets of 4000 and 3000 rows were once taken for the same: 22 of 192 rows were trained on twice."""
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(), tmp_path)
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
def test_an_epoch_has_every_row_once(tmp_path: Path, loading: str, micro_batch: int | None) -> None:
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(), tmp_path)
        rows, diloco = train(run, "a", micro_batch=micro_batch, **LOADINGS[loading])
        info = run.final()
        assert sorted(rows) == list(range(ROWS))
        assert rows != sorted(rows)
        assert info.tokens == ROUNDS * toy.STEPS * info.spec.unit_tokens
        assert run.told("a").state_digest == info.state_digest
        assert diloco.inner_step == 0, "no step is left over"


def test_two_workers_share_an_epoch(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(rounds=1, min_workers=2), tmp_path)
        taken = at_once({name: partial(train, run, name) for name in "ab"})
        info = run.final()
        assert len({*taken["a"][0], *taken["b"][0]}) == 2 * BATCH * toy.STEPS
        assert run.told("a").state_digest == run.told("b").state_digest == info.state_digest


def test_what_a_skipped_step_leaves_is_loaded_again_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(rounds=1), tmp_path)
        rows, _ = train(run, "a", skipped=(1,))
        info = run.final()
        assert rows[-BATCH:] == rows[-2 * BATCH : -BATCH]
        assert info.tokens == toy.STEPS * info.spec.unit_tokens
        assert f"1 of {toy.STEPS} units had no inner step" in caplog.text


def test_a_loop_without_a_step_ends_with_a_word(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(rounds=1), tmp_path)
        with pytest.raises(ModelError, match="all 4 batches of a round were loaded, and the optimizer .* not stepped"):
            train(run, "a", skipped=tuple(range(toy.STEPS)))


def test_a_loop_that_steps_on_every_micro_batch_is_told(tmp_path: Path) -> None:
    model = toy.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(), tmp_path)
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
def test_sizes_that_do_not_suit_are_refused(tmp_path: Path, rows: int, micro_batch: int | None, told: str) -> None:
    model = toy.make_model()
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        diloco = Toy(coordinator, spec(), tmp_path).connect(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ValueError, match=told):
            diloco.unit_sampler(range(rows), micro_batch)


def test_the_length_is_known_before_the_run_is_joined_and_is_what_is_left(tmp_path: Path) -> None:
    model = toy.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        diloco = Toy(coordinator, spec(rounds=1), tmp_path).connect(model, optimizer)
        sampler = diloco.unit_sampler(Rows(), 2)
        assert len(sampler) == 2 * toy.STEPS
        with diloco:
            for left in range(toy.STEPS, 0, -1):
                assert len(sampler) == 2 * left
                toy.step(diloco, model, optimizer, left)
            assert list(sampler) == [], "the run is over"


def test_units_that_a_loader_takes_ahead_are_refused(tmp_path: Path) -> None:
    model = toy.make_model()
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(), tmp_path)
        with run.connect(model, torch.optim.SGD(model.parameters(), lr=0.1)) as diloco:
            loader = DataLoader(Rows(), batch_sampler=([unit] for unit in diloco.units()), num_workers=1)
            with pytest.raises(RuntimeError, match=r"batch_sampler=diloco\.unit_sampler"):
                next(iter(loader))


def test_units_that_share_a_step_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = toy.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, spec(rounds=1), tmp_path)
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
