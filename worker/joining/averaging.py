"""The mean of a run's last states (LAWA, arXiv 2209.14981), computed from published checkpoints and deltas.

The states are rebuilt from a checkpoint and the deltas after it, fragment by fragment, with the outer steps that every
worker has taken. They equal the run's own states bit for bit, and no worker or coordinator has to store a mean.
"""

import torch
from torch import Tensor

from protocol import wire
from protocol.messages import CheckpointDetail, CheckpointInfo
from protocol.spec.run import RunSpec
from worker.errors import ModelError
from worker.link.client import Client
from worker.state.outer_state import OuterState


def base_of(kept: list[CheckpointInfo], last: int, count: int, run: str) -> int:
    """Return the newest checkpoint from which the `count` states up to `last` can be rebuilt. Raises ModelError if no
    kept checkpoint is old enough."""
    first = last - count + 1
    usable = sorted(each.round for each in kept if each.damage is None and each.round <= last)
    if first < 0:
        raise ModelError(f"the run {run} has {last + 1} states up to {last}: average {last + 1} of them at most")
    if not usable or usable[0] > first:
        reach = f"average {last - usable[0] + 1} at most, or keep" if usable else "keep"
        raise ModelError(
            f"the mean of {count} states up to {last} of the run {run} needs checkpoint {first} or an earlier one, "
            f"which is not kept any more: {reach} more of them (checkpoints.keep)"
        )
    return max(each for each in usable if each <= first)


def mean_of_fragment(client: Client, spec: RunSpec, base: CheckpointDetail, p: int, last: int, count: int) -> Tensor:
    """Return the mean of fragment p over the `count` states up to `last`, float32[n], rebuilt from checkpoint `base`. A
    state here is the point that the outer optimizer has reached (`protocol.outer_step.reached`).

    Raises Resync if the coordinator's files do not fit together, and Problem `gone` for a deleted file.
    """
    state = OuterState(base.layout, spec.outer, pin_memory=False, owns=lambda q: q == p)
    n = len(state.theta[p])
    state.load(p, client.checkpoint_fragment(base.round, base.fragments[p], wire.max_payload_bytes("fp32", 2 * n)))
    limit_bytes = wire.max_payload_bytes(spec.sync.download_codec, n)
    total = torch.zeros(n, dtype=torch.float64, device="cpu")
    for number in range(base.round, last + 1):
        if number > last - count:
            total += state.reached(p)
        if number < last:
            state.step(p, client.delta(number, p, limit_bytes))
    return (total / count).float()
