"""Batches made ahead of time: a thread makes the next ones, and copies them to the device, while the device trains.

At every inner step the loader asks the worker anew which units it expects to train on, so it follows whatever happens
to the round; a batch that is no longer needed is dropped. A batch depends only on its unit's number, so which batches
were made ahead never changes the training.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from worker.errors import Stopped
from worker.tuning.side_stream import SideStream

# Beside the current batch. One is enough while the device is slower than the loader; the others absorb a batch that
# takes long to make.
AHEAD = 3


class Units(Protocol):
    """Where batches come from: a `TrainingSet`, or the part of one that is used here."""

    def unit(self, number: int) -> Tensor: ...

    def expect(self, units: Sequence[int]) -> None: ...


class UnitNumbers(Protocol):
    """The numbers of the units that one worker trains on; `DiLoCo` implements it."""

    def units(self) -> Iterator[int]: ...

    def upcoming(self) -> Iterator[int]: ...


def batches(numbers: UnitNumbers, data: Units, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Yield each of `numbers.units()` with its batch, `data.unit(unit)`, on `device`.

    Batches are made on another thread, one at a time. An exception from making a batch is raised here when it is that
    batch's turn, except that Stopped ends the loop, so that the finished work can be contributed. No batch is begun
    after the iterator has ended or been closed. `data.expect` gets all units known to follow, whenever that changes.
    """
    copy = Copier(device)
    thread = ThreadPoolExecutor(1, "batches")
    made: dict[int, Future[Tensor]] = {}
    announced: set[int] = set()

    def begin(unit: int) -> None:
        if unit not in made:
            made[unit] = thread.submit(lambda: copy.ahead(data.unit(unit)))

    try:
        for unit in numbers.units():
            begin(unit)
            coming = list(islice(numbers.upcoming(), AHEAD))
            if not announced.issuperset((unit, *coming)):
                expected = [unit, *numbers.upcoming()]
                data.expect(expected)
                announced = set(expected)
            for unwanted in made.keys() - {unit, *coming}:
                made.pop(unwanted).cancel()
            for each in coming:
                begin(each)
            yield unit, copy.here(made.pop(unit).result())
    except Stopped:
        return
    finally:
        # Without waiting: the batch being made may itself wait for a file that is being fetched.
        thread.shutdown(wait=False, cancel_futures=True)


class Copier:
    """Copies batches to `device`. For CUDA, from pinned memory on a separate stream, so that neither the loop nor the
    kernels of an inner step wait for the copy; for other devices, when the batch is needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = SideStream(device) if device.type == "cuda" else None

    def ahead(self, batch: Tensor) -> Tensor:
        """Return `batch` on a CUDA device, copied completely; for other devices, unchanged."""
        if self._beside is None:
            return batch
        with self._beside.beside():
            return batch.pin_memory().to(self._device, non_blocking=True)

    def here(self, batch: Tensor) -> Tensor:
        """Return a batch from `ahead`, ready to be used on the calling thread's stream."""
        if self._beside is None:
            return batch.to(self._device)
        # Its memory belongs to the other stream, which would otherwise reuse it while kernels still read it.
        batch.record_stream(torch.cuda.current_stream(self._device))
        return batch
