"""One process of `benchmarks.loop --ranks`, started by torchrun: a worker of several processes, in turns with a bare
loop of the same model, which torch alone shards or replicates."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.loop import Size, Turns, bare_loop
from outerstep.common.exit_codes import Exit
from protocol.spec.run import parse_spec
from worker.agent import run_worker
from worker.inner.execution import layers_of
from worker.models.building import build_model
from worker.settings import WorkerSettings


def spread_by_torch(model: nn.Module, mode: str) -> nn.Module:
    """Return the model as in a plain torchrun script, replicated or sharded."""
    if mode == "ddp":
        return DistributedDataParallel(model)
    for layer in layers_of(model):
        fully_shard(layer)
    fully_shard(model)
    return model


def main() -> int:
    how = json.loads(sys.argv[1])
    spec, size = parse_spec(how["spec"]), Size(**how["size"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = spread_by_torch(build_model(spec, torch.device("cpu")), how["mode"])
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    turns = Turns(size, bare_loop(model, spec, size.segment, rows))
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
