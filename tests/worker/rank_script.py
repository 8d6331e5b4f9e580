"""A training script in as many processes as it is told, all of them one worker of the toy's run."""

import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness.coordinator import InThread
from outerstep import DiLoCo
from protocol.messages import Scope
from tests.support.forks import START
from tests.support.waiting import PATIENCE_S
from tests.worker import toy
from worker.ranks import Ranks
from worker.rounds.exchange import Exchange
from worker.state.saver import Saver

ROWS = 12

_numbers = itertools.count()

# Where a process dies, and the how manieth time that it comes there: after round 0, so that there is a snapshot.
STAGES = {
    "an inner step": (Ranks, "flags", 10),
    "the outer state is written": (Saver, "_write_state", 3),
    "the snapshot is written": (Saver, "_write", 3),
    "an upload": (Exchange, "contribute", 3),
    "a delta is waited for": (Exchange, "await_delta", 3),
}


class RankProcesses:
    """One worker of `size` processes. `mode`: plain, ddp, fsdp, or hybrid (two replicas, each of them sharded).

    stage   of STAGES, at which process `victim` gets kill −9
    stop    the step of the run at which `victim` gets SIGTERM
    whole_units    each process trains on all rows of a unit
    """

    def __init__(self, running: InThread, directory: Path, mode: str, size: int, name: str = "a", **how: Any) -> None:
        self._directory = directory / f"start-{next(_numbers)}"
        self._directory.mkdir(parents=True)
        given = {"mode": mode, "size": size, "name": name, "state_dir": str(directory / name)} | how
        given |= {"url": running.url, "token": running.token(Scope.WORKER), "directory": str(self._directory)}
        self._processes = [START.Process(target=_rank, args=(rank, given), daemon=True) for rank in range(size)]
        for each in self._processes:
            each.start()

    def wait(self) -> list[int | None]:
        """Their exit codes."""
        for each in self._processes:
            each.join(PATIENCE_S)
        return [each.exitcode for each in self._processes]

    def told(self, rank: int = 0) -> str:
        """What a process wrote to stderr."""
        return (self._directory / f"stderr-{rank}").read_text()

    def result(self, rank: int = 0) -> dict[str, Any]:
        """What a process found: its losses, the round of each, and how many elements it has of the model and of the outer θ."""
        found: dict[str, Any] = json.loads((self._directory / f"result-{rank}").read_text())
        return found

    def kill(self) -> None:
        for each in self._processes:
            each.kill()
            each.join()


def distributed(model: nn.Module, mode: str) -> nn.Module:
    if mode == "ddp":
        return DistributedDataParallel(model)
    if mode in ("fsdp", "hybrid"):
        size = dist.get_world_size()
        mesh = (
            init_device_mesh("cpu", (size,))
            if mode == "fsdp"
            else init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards"))
        )
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _rank(rank: int, how: dict[str, Any]) -> None:
    directory, size = Path(how["directory"]), how["size"]
    error = os.open(directory / f"stderr-{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(error, sys.stderr.fileno())
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{directory / 'group'}", rank=rank, world_size=size)
    if rank == how.get("victim") and "stage" in how:
        _die_at(*STAGES[how["stage"]])
    model = distributed(toy.make_model(), how["mode"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=toy.LR)
    given = {key: how[key] for key in ("url", "token", "name", "state_dir")}
    losses, rounds = list[float](), list[int]()
    with DiLoCo.connect(model, optimizer, run="toy", **given | {"state_dir": Path(how["state_dir"])}) as diloco:
        for unit in diloco.units():
            x, y = batch(unit, *((0, 1) if how.get("whole_units") else (rank, size)))
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            diloco.report_loss(loss)
            losses.append(loss.item())
            rounds.append(diloco.round)
            if diloco.global_step == how.get("stop") and rank == how["victim"]:
                os.kill(os.getpid(), signal.SIGTERM)
            optimizer.step()
            optimizer.zero_grad()
        found = {
            "losses": losses,
            "rounds": rounds,
            "stopped": diloco.stopped,
            "model": sum(map(_here, model.parameters())),
        }
        found["outer_state"] = sum(map(len, diloco.joined.state.theta))
        (directory / f"result-{rank}").write_text(json.dumps(found))
    if size > 1:
        dist.destroy_process_group()


def _here(parameter: Tensor) -> int:
    local: Any = parameter
    return int((local.to_local() if hasattr(local, "to_local") else local).numel())


def batch(unit: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(ROWS, 20, generator=torch.Generator().manual_seed(unit))[rank::size]
    return x, x.sum(1, keepdim=True).sin()


def _die_at(owner: type, name: str, call: int) -> None:
    was, calls = getattr(owner, name), itertools.count(1)

    def killed(*arguments: Any, **options: Any) -> Any:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return was(*arguments, **options)

    setattr(owner, name, killed)
