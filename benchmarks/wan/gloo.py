"""torch.distributed's all-reduce of fp32 among all workers, over the same lines."""

from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from benchmarks.harness.orders import timed
from benchmarks.wan.noise import noise

TIMEOUT = timedelta(minutes=30)
DISTRIBUTED: Any = distributed  # torch has no types for this part of it


def all_reduce(rank: int, workers: int, address: str, meeting: str, elements: int, rounds: int) -> None:
    """Do `rounds` all-reduces. `meeting` is a file by which the workers find each other."""
    values, summed = noise(elements, rank), torch.empty(elements)
    # By itself gloo takes the address of the machine's name, which is none behind a line.
    gloo = DISTRIBUTED.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = TIMEOUT
    group = gloo(DISTRIBUTED.FileStore(meeting, workers), rank, workers, options)

    def reduce() -> None:
        summed.copy_(values)
        group.allreduce(summed).wait()

    for _ in range(rounds):
        timed(reduce)
