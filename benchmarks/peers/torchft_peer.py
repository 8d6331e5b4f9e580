"""torchft: the all-reduce of a `Manager` over its gloo process group, fp32, with a lighthouse; a process per worker.

A sync is the all-reduce and the vote to commit. The quorum before it is reported separately.
"""

import argparse
import json
import multiprocessing
import time
from datetime import timedelta
from importlib.metadata import version
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch has no type for it
from torch.multiprocessing.spawn import spawn
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from benchmarks.peers import deltas

TIMEOUT = timedelta(minutes=15)


def main() -> None:
    arguments = deltas.arguments(__doc__)
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=arguments.workers)
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    context = multiprocessing.get_context("spawn")
    barrier, reports = context.Barrier(arguments.workers), context.SimpleQueue()
    # If one worker fails, this ends the others and raises its exception.
    spawn(worker, (arguments, address, barrier, reports), arguments.workers)
    lighthouse.shutdown()
    results = [reports.get() for _ in range(arguments.workers)]
    report = {
        "version": version("torchft"),
        "spans": [each["spans"][1:] for each in results],
        "before": {"what": "quorum", "spans": [each["quorum"][1:] for each in results]},
        "loopback_bytes": results[0]["loopback_bytes"][1:],
        "relative_error": max(each["relative_error"] for each in results),
    }
    print(json.dumps(report))


def worker(rank: int, arguments: argparse.Namespace, lighthouse: str, barrier: Barrier, reports: Any) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = joined(store, rank, arguments.workers, lighthouse)
    delta = torch.from_numpy(deltas.draw(rank, arguments.params))
    report: dict[str, Any] = {"spans": [], "quorum": [], "loopback_bytes": []}
    for _ in range(arguments.rounds + 1):
        values = delta.clone()
        barrier.wait()
        asked = time.monotonic()
        manager.start_quorum(allow_heal=False)
        report["quorum"].append((asked, time.monotonic()))
        if (found := manager.num_participants()) != arguments.workers:
            raise RuntimeError(f"{found} of {arguments.workers} workers are in the quorum")
        before = deltas.loopback_bytes()
        barrier.wait()
        started = time.monotonic()
        manager.allreduce(values).wait()
        committed = manager.should_commit()
        report["spans"].append((started, time.monotonic()))
        if not committed:
            raise RuntimeError(f"the all-reduce was not committed: {manager.errored()}")
        barrier.wait()
        report["loopback_bytes"].append(deltas.loopback_bytes() - before)
    exact = deltas.mean(arguments.workers, arguments.params)
    report["relative_error"] = deltas.relative_error(values.numpy(), exact)
    manager.shutdown(wait=False)
    reports.put(report)


def joined(store: TCPStore, rank: int, workers: int, lighthouse: str) -> Manager:
    """Return the manager of one worker. The others find it through its store."""
    return Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=workers,
        use_async_quorum=False,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=store.host,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"worker_{rank}",
        hostname=store.host,
        init_sync=False,
    )


if __name__ == "__main__":
    main()
