"""A worker of the benchmark: a process behind its line that takes orders (harness/remote_process.py).

sync    what `outerstep worker` does between two rounds' inner steps: encode, upload, wait, download, outer step
plain   one plain TCP transfer
gloo    torch.distributed's all-reduce of fp32 among all workers
train   rounds of a script with `outerstep.DiLoCo`, whose inner steps take a fixed time, as on an accelerator
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from benchmarks.wan.plain import Direction, transfer
from benchmarks.wan.timeline import StageRecorder
from harness.remote_process import answer, orders, timed
from outerstep import DiLoCo
from protocol import wire
from protocol.messages import Action, Assignment, JoinRequest
from worker.joining.recovery import seed
from worker.link.client import Client, open_http
from worker.link.membership import Membership
from worker.rounds.exchange import Exchange, Outcome
from worker.rounds.in_flight import InFlight
from worker.state import outer_state
from worker.state.fragments import Fragments
from worker.state.outer_state import OuterState
from worker.state.parameters import tensor_specs
from worker.state.work import Contribution

TIMEOUT = timedelta(minutes=30)


class FollowedClient(Client):
    """A client whose stages are recorded, after `record`."""

    def record(self, recorder: StageRecorder) -> None:
        self.stages, self._channel = recorder, replace(self._channel, stages=recorder)


class FollowedExchange(Exchange):
    """Reports to `recorder` which fragment each thread works on."""

    recorder: StageRecorder | None = None

    def contribute(self, contribution: Contribution, on_line: Callable[[], object] = lambda: None) -> Outcome:
        self._about(contribution)
        return super().contribute(contribution, on_line)

    def await_delta(self, contribution: Contribution, *events: Any) -> tuple[wire.Payload, list[Outcome]]:
        self._about(contribution)
        return super().await_delta(contribution, *events)

    def _about(self, contribution: Contribution) -> None:
        if self.recorder is not None:
            self.recorder.of(contribution.fragment)


def noise(elements: int, rank: int) -> torch.Tensor:
    """Draw float32[elements], as hard to compress as a pseudo-gradient."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)) * 1e-3


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


class Flat(nn.Module):
    """A model that is one vector of zeros, float32[elements], so that its state 0 compresses to nothing."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(elements))


def main() -> None:
    torch.set_num_threads(1)
    answer(at="started")
    act: dict[str, Callable[..., None]] = {"sync": synchronise, "plain": plain, "gloo": all_reduce, "train": train}
    for order in orders():
        act[order.pop("do")](**order)


def synchronise(
    url: str,
    ca: str | None,
    run: str,
    token: str,
    rank: int,
    elements: int,
    rounds: int,
    direct: bool = True,
    record: bool = False,
) -> None:
    """Do `rounds` syncs, and answer with the payload bytes that each one moved. `direct`: use the coordinator's store,
    if it can be used. `record`: answer with what each fragment was in, too (timeline.py)."""
    delta, model = noise(elements, rank), Flat(elements)
    with open_http(url, None if ca is None else Path(ca)) as http:
        client, recorder = FollowedClient(http, run, token), StageRecorder()
        if record:
            client.record(recorder)
        detail = client.run_detail()
        client.store.offer(detail.direct and direct)
        spec = detail.spec
        membership = Membership(client, f"worker-{rank}", JoinRequest(tensors=tensor_specs(model)), None)
        layout = membership.join().layout
        state = OuterState(layout, spec.outer, pin_memory=False)

        def ask(state_round: int | None) -> Assignment:
            return membership.act(partial(client.assignment, worker=membership.worker, state_round=state_round))

        while (asked := ask(None)).action is not Action.RECOVER:
            if asked.action is Action.SEED:
                seed(membership, spec, Fragments(model, layout), state)
        for p in range(len(state)):  # state 0 is known to everybody here
            state.set(p, torch.zeros(layout.elements[p]), None)
        exchange = FollowedExchange(membership, spec, state, torch.device("cpu"))
        if record:
            exchange.recorder = recorder

        def sync(work: list[Contribution]) -> dict[str, Any]:
            recorder.spans.clear()
            up, down = client.traffic.upload_bytes, client.traffic.download_bytes
            flight = InFlight(exchange, work[0].round)
            for each in work:
                flight.send_made(each)
            flight.end()
            moved = {"up": client.traffic.upload_bytes - up, "down": client.traffic.download_bytes - down}
            return {**moved, "spans": recorder.spans}

        for round_ in range(rounds):
            while (asked := ask(round_)).action is not Action.TRAIN:
                pass
            deltas = enumerate(delta.split(layout.elements))
            work = [Contribution(round_, p, asked.units, 1, 1, 1.0, 1.0, each) for p, each in deltas]
            timed(partial(sync, work), client.open_ahead)


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
