"""torch.distributed's all-reduce of fp32 among all workers, over the same lines."""

from datetime import timedelta

import torch
from torch import distributed

from benchmarks.wan.noise import noise
from harness.orders import timed

TIMEOUT = timedelta(minutes=30)


def all_reduce(rank: int, workers: int, meeting: str, elements: int, rounds: int) -> None:
    """Do `rounds` all-reduces. `meeting` is a file by which the workers find each other."""
    values, summed = noise(elements, rank), torch.empty(elements)
    where = f"file://{meeting}"
    distributed.init_process_group("gloo", where, timeout=TIMEOUT, world_size=workers, rank=rank)

    def reduce() -> None:
        summed.copy_(values)
        distributed.all_reduce(summed)

    for _ in range(rounds):
        timed(reduce)
    distributed.destroy_process_group()
