"""A run's work units for a script's DataLoader, which loads ahead of the training."""

import logging
import sys
from collections.abc import Callable, Iterator, Sized
from typing import Any, Protocol

from torch import Tensor, nn
from torch import device as Device  # noqa: N812
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from protocol.spec.run import RunSpec
from worker.data.order import Order
from worker.errors import ModelError
from worker.ranks import ALONE, Ranks
from worker.state.parameters import is_sharded, trainable_parameters
from worker.state.work import UnitRanges, count, numbers

log = logging.getLogger(__name__)


class RoundPosition(Protocol):
    """Where a worker is in its round."""

    taken: int

    @property
    def units_to_come(self) -> UnitRanges: ...


class UnitSampler(Sampler[list[int]]):
    """A DataLoader's `batch_sampler`: row numbers of the data set, in micro-batches, for the inner steps of one round.

    One pass of the loader is the rest of a round, so however far it loads ahead, it never goes beyond the round. The
    k-th inner step of a round counts for its k-th unit. If steps were skipped, as a GradScaler does, a pass ends before
    the round does, and the next pass repeats the units that lack a step. In each epoch of the data set, all workers
    together train on every row once, except for a remainder smaller than a unit, in a new order.

        rows          of the data set; a unit is `inner.batch_size` of them
        micro_batch   rows per batch of the loader; None: a whole unit, or this process's part of it
        finished      returns True if training must stop
        ranks         the processes that train one model; each has its own part of every unit

    Raises ValueError if there are fewer rows than a unit has, or if a unit is not a whole number of micro-batches.
    """

    def __init__(
        self,
        spec: RunSpec,
        rows: int,
        micro_batch: int | None,
        steps: RoundPosition,
        finished: Callable[[], bool],
        ranks: Ranks = ALONE,
    ) -> None:
        unit = spec.inner.batch_size
        if rows < unit:
            raise ValueError(f"the data set has {rows} rows, but a unit of this run has {unit}, its inner.batch_size")
        if unit % ranks.size:
            raise ValueError(
                f"a unit of this run has {unit} rows, its inner.batch_size, which {ranks.size} processes cannot "
                "share equally: start a number of processes that divides it"
            )
        part = unit // ranks.size
        self._micro_batch = part if micro_batch is None else micro_batch
        if self._micro_batch < 1 or part % self._micro_batch:
            shared = f", {part} of them for each of {ranks.size} processes" if ranks.size > 1 else ""
            raise ValueError(
                f"micro_batch = {micro_batch}: a unit of this run has {unit} rows, its inner.batch_size{shared}, "
                "which is not a multiple of that"
            )
        self._spec, self._steps, self._finished, self._ranks = spec, steps, finished, ranks
        self._batches_per_unit = part // self._micro_batch
        self._order = Order([rows], unit, spec.seed)
        self._passed: tuple[int, UnitRanges] | None = None  # the last pass: the steps before it, and its units

    def __len__(self) -> int:
        """The batches of the next pass; before the run is joined, those of a round."""
        return (count(self._steps.units_to_come) or self._spec.sync.inner_steps) * self._batches_per_unit

    def __iter__(self) -> Iterator[list[int]]:
        """Yield batches of row numbers. Raises ModelError if the last pass was loaded completely and there was no inner
        step, or more steps than units."""
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
        """Check that the last pass had a step for each of its units."""
        if self._passed is None:
            return
        (before, passed), self._passed = self._passed, None
        if taken == before:
            raise ModelError(
                f"all {count(passed) * self._batches_per_unit} batches of a round were loaded, and the optimizer "
                "that DiLoCo was given has not stepped: step it once per unit"
            )
        if taken - before > count(passed):
            raise ModelError(
                f"{taken - before} inner steps were done on the {count(passed)} units of a round: the optimizer "
                f"must step once for every {self._batches_per_unit} batches of the loader, which together have the "
                "rows of a unit"
            )
        if taken - before < count(passed) and units[-1][1] == passed[-1][1]:
            log.warning(
                "%d of %d units had no inner step and are loaded again. If several batches make a step, pass "
                "their number of rows as unit_sampler(micro_batch=…)",
                count(units),
                count(passed),
            )


# Options of how it loads, not of what.
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
_PLAIN = (RandomSampler, SequentialSampler, DistributedSampler)  # orders that the run's may replace


def unit_batches(
    loader: Any, sampler_of: Callable[[Sized, int], UnitSampler], finished: Callable[[], bool]
) -> Iterator[Any]:
    """Yield the batches of a loader like `loader`, with as many rows, in the order of the sampler that `sampler_of`
    returns for its data set and batch size, until `finished`. If accelerate has prepared the loader, batches are on its
    device.

    Raises TypeError for anything but a loader of numbered rows, and ValueError for an order that would be lost, and for
    a size that does not fit.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"batches() takes a torch.utils.data.DataLoader, but this is {type(loader).__name__}")
    batches: Any = loader.batch_sampler
    rows = loader.dataset
    while hasattr(batches, "batch_sampler"):  # of accelerate, which distributes batches to processes
        batches = batches.batch_sampler
    if isinstance(rows, IterableDataset) or not isinstance(rows, Sized):
        raise TypeError(
            f"the data set of this loader, {type(rows).__name__}, has no numbered rows, which the run's units "
            "consist of: use units() or diloco.data_seed, and draw the batches yourself"
        )
    size = getattr(batches, "batch_size", None)
    if size is None:
        raise ValueError("this loader has no batch_size: give it the number of rows per batch")
    order = getattr(batches, "sampler", None)
    if not isinstance(order, _PLAIN):
        raise ValueError(
            f"this loader has an order of its own, {type(order or batches).__name__}, which would be lost: the run "
            "uses every row once per epoch. Give the loader shuffle=True, or use units() and draw the rows of "
            "each yourself"
        )
    kept = {name: getattr(loader, name) for name in _KEPT}
    units: DataLoader[Any] = DataLoader(rows, batch_sampler=sampler_of(rows, size), **kept)
    return _until(units, _placing(loader), finished)


def _until(units: "DataLoader[Any]", place: Callable[[Any], Any], finished: Callable[[], bool]) -> Iterator[Any]:
    while not finished():  # one pass is the rest of a round
        for batch in units:
            yield place(batch)


def _placing(loader: Any) -> Callable[[Any], Any]:
    """Return a function that moves a batch to the device of `loader`."""
    where = getattr(loader, "device", None)
    if not isinstance(where, Device):
        return lambda batch: batch
    operations = sys.modules["accelerate.utils"]
    return lambda batch: operations.send_to_device(batch, where)


class FirstUnits:
    """Watches the first units of a loop, to detect a loader that loads ahead: it takes units before the earlier ones
    are trained on. A unit may have nothing to train on."""

    def __init__(self, model: nn.Module) -> None:
        # For sharded parameters, autograd does not accumulate the gradients.
        parameters = [each for each in trainable_parameters(model).values() if not is_sharded(each)]
        self._handles = [each.register_post_accumulate_grad_hook(self._note) for each in parameters]
        self._has_gradient, self._without = False, 0

    def _note(self, _: Tensor) -> None:
        self._has_gradient = True

    def end(self, *, stepped: bool) -> None:
        """Note the end of a unit. Raises RuntimeError at the second one if neither had a step (`stepped`) or a
        gradient."""
        if not self._handles:
            return
        self._without += 1
        if stepped or self._has_gradient:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
        elif self._without > 1:
            raise RuntimeError(
                "units() was asked for a third unit before the first was trained on, as by a DataLoader, which "
                "loads ahead: use batch_sampler=diloco.unit_sampler(dataset) for it, or take units in the "
                "training loop"
            )
