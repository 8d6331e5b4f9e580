"""hivemind over long lines: one averager in a separate process that takes orders; otherwise as in hivemind_peer.py.

A sync starts when all averagers have found each other, so it does not include the matchmaking.
"""

import time
from typing import Any

import torch
from hivemind import DHT, DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Uniform8BitQuantization

from benchmarks.peers import deltas
from harness.remote_process import answer, orders, stay, timed

TIMEOUT_S = 1800


def average(rank: int, workers: int, address: str, meeting: list[str] | None, elements: int, rounds: int) -> None:
    """Do `rounds` averages. `meeting`: the addresses of rank 0's DHT, which it reports."""
    dht = DHT(host_maddrs=[f"/ip4/{address}/tcp/0"], initial_peers=meeting or [], start=True)
    if meeting is None:
        answer(meeting=[str(each) for each in dht.get_visible_maddrs()])
    averager = DecentralizedAverager(
        [torch.zeros(elements)],
        dht,
        prefix="sync",
        target_group_size=workers,
        min_group_size=workers,
        compression=Uniform8BitQuantization(),
        start=True,
    )
    values = torch.from_numpy(deltas.draw(rank, elements))
    for _ in range(rounds):
        with averager.get_tensors() as tensors:
            tensors[0].copy_(values)
        step = _matched(averager)

        def reduce(step: Any = step) -> None:
            step.allow_allreduce()
            step.result(timeout=TIMEOUT_S)

        timed(reduce)
    with averager.get_tensors() as tensors:
        answer(relative_error=deltas.relative_error(tensors[0].numpy(), deltas.mean(workers, elements)))
    stay()
    averager.shutdown()
    dht.shutdown()


def _matched(averager: DecentralizedAverager) -> Any:
    """Return a step of a group that waits to begin."""
    step = averager.step(wait=False, require_trigger=True, timeout=TIMEOUT_S)
    while step.stage is not AveragingStage.AWAITING_TRIGGER:
        if step.done():
            raise RuntimeError(f"no group: {step.stage.name}") from step.exception()
        time.sleep(0.002)
    return step


if __name__ == "__main__":
    for order in orders():
        average(**order)
