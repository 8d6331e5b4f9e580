"""A run's work units for a DataLoader, which loads ahead of the training.

A script's DataLoader, made to load the run's units in the place of its own order.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol

from torch import device as Device  # noqa: N812
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from protocol.spec.run import RunSpec
from worker.data.order import Order
from worker.errors import ModelError
from worker.ranks import ALONE, Ranks
from worker.state.work import UnitRanges, count, numbers

log = logging.getLogger(__name__)


class Steps(Protocol):
    """Where a worker is."""

    taken: int

    @property
    def units_to_come(self) -> UnitRanges: ...


class UnitSampler(Sampler[list[int]]):
    """A DataLoader's `batch_sampler`: row numbers of the data set, in micro-batches, for the inner steps of one round.

    One pass of the loader is what is left of a round, so however far it loads ahead, it is never beyond it. The k-th
    inner step of a round counts for its k-th unit. Where steps were skipped, as a GradScaler does, a pass ends before
    the round, and the next one has the units again that are short of a step. Each epoch of the data set has every row
    once, but for fewer than a unit has, over all workers together, in an order of its own.

    rows          those of the data set; a unit is `inner.batch_size` of them
    micro_batch   rows of one batch of the loader; None: all of a unit, or of this process's part of it
    finished      says whether training is to stop
    ranks         the processes that train one model; each has its own part of every unit

    Raises ValueError where the rows are fewer than a unit's, or a unit is no whole number of micro-batches.
    """

    def __init__(
        self,
        spec: RunSpec,
        rows: int,
        micro_batch: int | None,
        steps: Steps,
        finished: Callable[[], bool],
        ranks: Ranks = ALONE,
    ) -> None:
        unit = spec.inner.batch_size
        if rows < unit:
            raise ValueError(f"the data set has {rows} rows, and a unit of this run has {unit}, its inner.batch_size")
        if unit % ranks.size:
            raise ValueError(
                f"a unit of this run has {unit} rows, its inner.batch_size, which {ranks.size} processes cannot share: "
                "start as many as divide it"
            )
        part = unit // ranks.size
        self._micro_batch = part if micro_batch is None else micro_batch
        if self._micro_batch < 1 or part % self._micro_batch:
            shared = f", {part} of them for each of {ranks.size} processes" if ranks.size > 1 else ""
            raise ValueError(
                f"micro_batch = {micro_batch}: a unit of this run has {unit} rows, its inner.batch_size{shared}, which "
                "is no whole number of such micro-batches"
            )
        self._spec, self._steps, self._finished, self._ranks = spec, steps, finished, ranks
        self._batches_per_unit = part // self._micro_batch
        self._order = Order([rows], unit, spec.seed)
        self._passed: tuple[int, UnitRanges] | None = None  # the last pass: the steps before it, and its units

    def __len__(self) -> int:
        """The batches of the next pass; before the run is joined, those of a round."""
        return (count(self._steps.units_to_come) or self._spec.sync.schedule_steps) * self._batches_per_unit

    def __iter__(self) -> Iterator[list[int]]:
        """Raises ModelError where all of the last pass was loaded, and there was no inner step, or more than units."""
        if self._finished():
            return
        taken, units = self._steps.taken, self._steps.units_to_come
        self._tell(taken, units)
        for unit in numbers(units):
            if self._finished():
                return
            of_all = self._order.places(self._spec.number_in_set(unit)).rows.tolist()
            rows = of_all[self._ranks.rank :: self._ranks.size]
            for start in range(0, len(rows), self._micro_batch):
                yield rows[start : start + self._micro_batch]
        self._passed = taken, units

    def _tell(self, taken: int, units: UnitRanges) -> None:
        """Tell where the last pass ended without a step for each of its units."""
        if self._passed is None:
            return
        (before, passed), self._passed = self._passed, None
        if taken == before:
            raise ModelError(
                f"all {count(passed) * self._batches_per_unit} batches of a round were loaded, and the optimizer that "
                "DiLoCo was given has not stepped: let it step once for every unit"
            )
        if taken - before > count(passed):
            raise ModelError(
                f"{taken - before} inner steps were done on the {count(passed)} units of a round: the optimizer has to "
                f"step once for every {self._batches_per_unit} batches of the loader, which have the rows of a unit"
            )
        if taken - before < count(passed) and units[-1][1] == passed[-1][1]:
            log.warning(
                "%d of %d units had no inner step: they are loaded again. Where several batches make a step, "
                "unit_sampler(micro_batch=…) has to say how many rows each has",
                count(units),
                count(passed),
            )


# What says how it loads, not what.
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)
_PLAIN = (RandomSampler, SequentialSampler, DistributedSampler)  # an order that the run's takes the place of


def unit_batches(
    loader: Any, sampler_of: Callable[[Sized, int], UnitSampler], finished: Callable[[], bool]
) -> Iterator[Any]:
    """Yield the batches of a loader like `loader`, of as many rows, in the order of the sampler that `sampler_of` gives
    for its data set and batch size, until `finished`. What accelerate has prepared puts them on its device.

    Raises TypeError for what is no loader of rows by number, and ValueError for an order that would be lost, and for a
    size that does not suit.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"batches() takes a torch.utils.data.DataLoader, and this is {type(loader).__name__}")
    batches: Any = loader.batch_sampler
    rows = loader.dataset
    while hasattr(batches, "batch_sampler"):  # accelerate's, which deals batches to processes
        batches = batches.batch_sampler
    if isinstance(rows, IterableDataset) or not isinstance(rows, Sized):
        raise TypeError(
            f"the data set of this loader, {type(rows).__name__}, has no rows by number, of which the run's units are: "
            "take units() or diloco.data_seed, and draw the batches of each by yourself"
        )
    size = getattr(batches, "batch_size", None)
    if size is None:
        raise ValueError("this loader has no batch_size, the rows of one of its batches: give it one")
    order = getattr(batches, "sampler", None)
    if not isinstance(order, _PLAIN):
        raise ValueError(
            f"this loader's order is of {type(order or batches).__name__}, and would be lost: the run deals every row "
            "once an epoch. Give the loader shuffle=True, or take units() and draw the rows of each by yourself"
        )
    kept = {name: getattr(loader, name) for name in _KEPT}
    units: DataLoader[Any] = DataLoader(rows, batch_sampler=sampler_of(rows, size), **kept)
    return _until(units, _placing(loader), finished)


def _until(units: "DataLoader[Any]", place: Callable[[Any], Any], finished: Callable[[], bool]) -> Iterator[Any]:
    while not finished():  # one pass is what is left of a round
        for batch in units:
            yield place(batch)


def _placing(loader: Any) -> Callable[[Any], Any]:
    """Return what puts a batch where those of `loader` are."""
    where = getattr(loader, "device", None)
    if not isinstance(where, Device):
        return lambda batch: batch
    operations = sys.modules["accelerate.utils"]
    return lambda batch: operations.send_to_device(batch, where)
