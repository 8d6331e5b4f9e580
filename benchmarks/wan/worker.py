"""A worker of the benchmark: a process behind its line that takes orders (harness/remote_process.py).

sync    what `outerstep worker` does between two rounds' inner steps: encode, upload, wait, download, outer step
plain   one plain TCP transfer
gloo    torch.distributed's all-reduce of fp32 among all workers
train   rounds of a script with `outerstep.DiLoCo`, whose inner steps take a fixed time, as on an accelerator
"""

import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from benchmarks.syncing import Flat, SyncingWorker, noise
from benchmarks.wan.plain import Direction, transfer
from harness.remote_process import answer, orders, timed
from outerstep import DiLoCo
from worker.link.client import Client, open_http
from worker.state import outer_state
from worker.state.work import Contribution

TIMEOUT = timedelta(minutes=30)


def all_reduce(rank: int, workers: int, meeting: str, elements: int, rounds: int) -> None:
    """Do `rounds` all-reduces. `meeting`: the file by which the workers find each other."""
    values, summed = noise(elements, rank), torch.empty(elements)
    where = f"file://{meeting}"
    distributed.init_process_group("gloo", where, timeout=TIMEOUT, world_size=workers, rank=rank)

    def reduce() -> None:
        summed.copy_(values)
        distributed.all_reduce(summed)

    for _ in range(rounds):
        timed(reduce)
    distributed.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    answer(at="started")
    act: dict[str, Callable[..., None]] = {"sync": synchronise, "plain": plain, "gloo": all_reduce, "train": train}
    for order in orders():
        act[order.pop("do")](**order)


def synchronise(url: str, ca: str | None, run: str, token: str, rank: int, elements: int, rounds: int) -> None:
    """Do `rounds` syncs, and answer with the payload bytes that each one moved."""
    with open_http(url, None if ca is None else Path(ca)) as http:
        client = Client(http, run, token)
        worker = SyncingWorker(client, rank, elements)

        def sync(work: list[Contribution]) -> dict[str, Any]:
            up, down = client.traffic.upload_bytes, client.traffic.download_bytes
            worker.sync(work)
            return {"up": client.traffic.upload_bytes - up, "down": client.traffic.download_bytes - down}

        for round_ in range(rounds):
            timed(partial(sync, worker.work(round_)), client.open_ahead)


def plain(address: str, port: int, way: Direction, size: int) -> None:
    timed(partial(transfer, address, port, way, size))


def train(url: str, run: str, token: str, rank: int, elements: int, step_s: float, measured: int) -> None:
    """Train to the end of the run. Return the start of the first inner step, the end of `measured` rounds, and the
    seconds in inner steps between them."""
    model, in_steps = Flat(elements), 0.0
    first: float | None = None
    ended: float | None = None
    model.w.grad = noise(elements, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step_ended = 0.0

    def note_end(*_: Any) -> None:
        nonlocal step_ended
        step_ended = time.monotonic()

    optimizer.register_step_post_hook(note_end)  # before DiLoCo's, which synchronises
    outer_state.MAPPED_FROM = elements + 1  # in memory, as on a GPU: so it trains on if the run says that
    with tempfile.TemporaryDirectory(prefix="outerstep-wan-") as folder:
        name, state_dir = f"worker-{rank}", Path(folder)
        with DiLoCo.connect(model, optimizer, url=url, run=run, token=token, name=name, state_dir=state_dir) as diloco:
            for _ in diloco.units():
                began = time.monotonic()
                first = began if first is None else first
                time.sleep(step_s)
                optimizer.step()
                if ended is None:
                    in_steps += step_ended - began
                    if diloco.round == measured or diloco.finished:
                        ended = time.monotonic()
    answer(started=first, ended=ended, in_steps=in_steps)


if __name__ == "__main__":
    main()
