"""hivemind: a `DecentralizedAverager` per worker, each in a separate process, with uniform 8 bit compression.

A sync lasts from when all averagers have found each other through the DHT until the last one holds the mean. The
matchmaking before it is reported separately. The tensors are in the averagers' shared memory.
"""

import json
import time
from importlib.metadata import version

import torch
from hivemind import DHT, DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Uniform8BitQuantization

from benchmarks.peers import deltas

TIMEOUT_S = 120


def main() -> None:
    arguments = deltas.arguments(__doc__)
    dhts = [DHT(start=True)]
    peers = dhts[0].get_visible_maddrs()
    dhts += [DHT(initial_peers=peers, start=True) for _ in range(arguments.workers - 1)]
    averagers = [
        DecentralizedAverager(
            [torch.zeros(arguments.params)],
            dht,
            prefix="sync",
            target_group_size=arguments.workers,
            min_group_size=arguments.workers,
            compression=Uniform8BitQuantization(),
            start=True,
        )
        for dht in dhts
    ]
    values = [torch.from_numpy(deltas.draw(rank, arguments.params)) for rank in range(arguments.workers)]
    spans, matchmaking, moved = [], [], []
    for _ in range(arguments.rounds + 1):
        for averager, delta in zip(averagers, values, strict=True):
            with averager.get_tensors() as tensors:
                tensors[0].copy_(delta)
        asked = time.monotonic()
        steps = [averager.step(wait=False, require_trigger=True, timeout=TIMEOUT_S) for averager in averagers]
        while any(step.stage is not AveragingStage.AWAITING_TRIGGER for step in steps):
            if time.monotonic() - asked > TIMEOUT_S or any(step.done() for step in steps):
                raise RuntimeError(f"no group of {arguments.workers}: {[step.stage.name for step in steps]}")
            time.sleep(0.002)
        before = deltas.loopback_bytes()
        started = time.monotonic()
        for step in steps:
            step.allow_allreduce()
        for step in steps:
            step.result(timeout=TIMEOUT_S)
        spans.append((started, time.monotonic()))
        matchmaking.append((asked, started))
        moved.append(deltas.loopback_bytes() - before)
    exact = deltas.mean(arguments.workers, arguments.params)
    errors = []
    for averager in averagers:
        with averager.get_tensors() as tensors:
            errors.append(deltas.relative_error(tensors[0].numpy(), exact))
    for each in (*averagers, *dhts):
        each.shutdown()
    report = {
        "version": version("hivemind"),
        "spans": [spans[1:]],
        "before": {"what": "matchmaking", "spans": [matchmaking[1:]]},
        "loopback_bytes": moved[1:],
        "relative_error": max(errors),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
