"""torchft over long lines: one worker in a separate process that takes orders; otherwise as in torchft_peer.py.

A sync is the all-reduce and the vote to commit, without the quorum before it.
"""

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch has no type for it
from torchft.coordination import LighthouseServer

from benchmarks.peers import deltas
from benchmarks.peers.torchft_peer import joined
from harness.remote_process import answer, orders, stay, timed


def average(rank: int, workers: int, address: str, meeting: str | None, elements: int, rounds: int) -> None:
    """Do `rounds` all-reduces. `meeting`: the address of the lighthouse, which rank 0 runs and reports."""
    lighthouse = None
    if meeting is None:
        lighthouse = LighthouseServer(bind=f"{address}:0", min_replicas=workers)
        meeting = f"http://{address}:{lighthouse.address().rpartition(':')[2]}"
        answer(meeting=meeting)
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = joined(store, rank, workers, meeting)
    values = torch.from_numpy(deltas.draw(rank, elements))
    summed = torch.empty_like(values)

    def reduce() -> None:
        manager.allreduce(summed).wait()
        if not manager.should_commit():
            raise RuntimeError(f"the all-reduce was not committed: {manager.errored()}")

    for _ in range(rounds):
        summed.copy_(values)
        manager.start_quorum(allow_heal=False)
        if (found := manager.num_participants()) != workers:
            raise RuntimeError(f"{found} of {workers} workers are in the quorum")
        timed(reduce)
    answer(relative_error=deltas.relative_error(summed.numpy(), deltas.mean(workers, elements)))
    stay()
    manager.shutdown(wait=False)
    if lighthouse is not None:
        lighthouse.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for order in orders():
        average(**order)
