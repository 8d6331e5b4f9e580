"""One process of `benchmarks.loop --ranks`, as torchrun starts it: a worker of several processes, in turns with a bare
loop of the same model, sharded or replicated by torch alone."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.loop import Seconds, Size, Turns
from protocol.exit_codes import Exit
from protocol.spec.run import RunSpec, parse_spec
from worker.agent import run_worker
from worker.data.text import TextData
from worker.inner.layers import layers_of
from worker.models.building import build_model
from worker.settings import WorkerSettings


def bare_loop(spec: RunSpec, segment: int, mode: str) -> Callable[[], Seconds]:
    """Return what trains on for `segment` steps, as a plain script of torchrun does, and returns their seconds."""
    model: nn.Module = build_model(spec, torch.device("cpu"))
    data, rank, size = TextData(spec), dist.get_rank(), dist.get_world_size()
    if mode == "fsdp":
        for layer in layers_of(model):
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=spec.inner.learning_rate, fused=True)
    model.train()
    unit = 0

    def train() -> Seconds:
        nonlocal unit
        began = Seconds.now()
        for _ in range(segment):
            batch = data.unit(unit)[rank::size]
            logits = model(batch[:, :-1]).logits
            loss = functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            unit += 1
        return Seconds.now().since(began)

    return train


def main() -> int:
    how = json.loads(sys.argv[1])
    spec, size = parse_spec(how["spec"]), Size(**how["size"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    turns = Turns(size, bare_loop(spec, size.segment, how["mode"]))
    hook = register_optimizer_step_post_hook(turns)
    given = {key: how[key] for key in ("url", "token", "mode")}
    directory = Path(how["directory"])
    code = run_worker(
        WorkerSettings(run=spec.name, name="worker", state_dir=directory / "worker", device="cpu", threads=1, **given)
    )
    hook.remove()
    if os.environ["RANK"] == "0":
        found = {"worker": turns.worker, "around": turns.around}
        (directory / "turns.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0 if code is Exit.DONE else 1


if __name__ == "__main__":
    sys.exit(main())
