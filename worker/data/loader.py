"""Batches ahead of need: a thread makes the next ones while the device trains, and copies them to it.

What is made ahead is asked for anew at every inner step, from what the worker then knows that it will train on, so it
follows whatever happens to the round; a batch that is not wanted any more is forgotten. A batch is a pure function of
its unit's number, so nothing depends on which ones were made ahead.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from worker.errors import Stopped
from worker.tuning.side_stream import SideStream

# Beside the one that is trained on. One is enough for a device that is the slower of the two; the others make up for a
# batch that takes long.
AHEAD = 3


class Source(Protocol):
    """What batches are made of."""

    def unit(self, number: int) -> Tensor: ...

    def expect(self, units: Sequence[int]) -> None: ...


class Numbers(Protocol):
    """The units that one worker trains on; `DiLoCo` is one."""

    def units(self) -> Iterator[int]: ...

    def upcoming(self) -> Iterator[int]: ...


def batches(numbers: Numbers, data: Source, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Yield each of `numbers.units()` with its batch, `data.unit(unit)`, on `device`.

    Batches are made on another thread, one at a time. What making one raises is raised here in its place; but Stopped
    ends the loop, so that what was trained can be handed in. When the iterator ends or is closed nothing more is begun.
    `data.expect` is told all units that are known to come whenever there are new ones.
    """
    copy = Copier(device)
    thread = ThreadPoolExecutor(1, "batches")
    made: dict[int, Future[Tensor]] = {}
    told: set[int] = set()

    def begin(unit: int) -> None:
        if unit not in made:
            made[unit] = thread.submit(lambda: copy.ahead(data.unit(unit)))

    try:
        for unit in numbers.units():
            begin(unit)
            coming = list(islice(numbers.upcoming(), AHEAD))
            if not told.issuperset((unit, *coming)):
                expected = [unit, *numbers.upcoming()]
                data.expect(expected)
                told = set(expected)
            for unwanted in made.keys() - {unit, *coming}:
                made.pop(unwanted).cancel()
            for each in coming:
                begin(each)
            yield unit, copy.here(made.pop(unit).result())
    except Stopped:
        return
    finally:
        # Without waiting: what is being made may itself wait, for a file that is on its way.
        thread.shutdown(wait=False, cancel_futures=True)


class Copier:
    """Copies batches to `device`. To CUDA they go from pinned memory, on a stream of their own, so that neither the
    loop nor a kernel of an inner step waits for them; elsewhere they go when they are needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = SideStream(device) if device.type == "cuda" else None

    def ahead(self, batch: Tensor) -> Tensor:
        """Return `batch`, on the device where it can be there ahead of need; its bytes are there on return."""
        if self._beside is None:
            return batch
        with self._beside.beside():
            return batch.pin_memory().to(self._device, non_blocking=True)

    def here(self, batch: Tensor) -> Tensor:
        """Return `batch`, made by `ahead`, for the calling thread's stream to use."""
        if self._beside is None:
            return batch.to(self._device)
        # Its memory belongs to the other stream, which would take it back while kernels still read it.
        batch.record_stream(torch.cuda.current_stream(self._device))
        return batch
