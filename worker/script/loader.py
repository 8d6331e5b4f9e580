"""A script's DataLoader, made to load the run's units in the place of its own order."""

import sys
from collections.abc import Callable, Iterator, Sized
from typing import Any

from torch import device as Device  # noqa: N812
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from worker.script.sampler import UnitSampler

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
