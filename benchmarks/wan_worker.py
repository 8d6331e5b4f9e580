"""One worker of benchmarks/wan.py, a process of its own behind its line: orders come as JSON lines on stdin, answers go
as JSON lines to stdout. Times are of the machine's monotonic clock.

  sync    what `outerstep worker` does between two rounds' inner steps: encode, upload, wait, download, outer step
  train   rounds of a script with `outerstep.DiLoCo`, whose inner steps take a fixed time, as an accelerator's would
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outerstep import DiLoCo
from protocol.messages import Action, Assignment, JoinRequest
from worker.link import seeding
from worker.link.client import Client, open_http
from worker.link.membership import Membership
from worker.rounds.exchange import Exchange
from worker.rounds.flight import Flight
from worker.state.fragments import Fragments
from worker.state.outer_state import OuterState
from worker.state.parameters import tensor_specs
from worker.state.work import Contribution


class Flat(nn.Module):
    """A model that is one vector, float32[elements], of zeros: its state 0 costs no line anything."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(elements))


def main() -> None:
    torch.set_num_threads(1)
    say(at="started")
    for line in sys.stdin:
        order = json.loads(line)
        act: dict[str, Callable[..., None]] = {"sync": synchronise, "train": train}
        act[order.pop("do")](**order)


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def noise(elements: int, rank: int) -> torch.Tensor:
    """Draw float32[elements], as hard to compress as a pseudo-gradient."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)) * 1e-3


def synchronise(url: str, run: str, token: str, rank: int, elements: int, rounds: int) -> None:
    """Do `rounds` syncs, each when a line comes in. Return when they began and ended, and the payload bytes moved."""
    delta, model = noise(elements, rank), Flat(elements)
    with open_http(url) as http:
        client = Client(http, run, token)
        spec = client.run_detail().spec
        membership = Membership(client, f"worker-{rank}", JoinRequest(tensors=tensor_specs(model)), None)
        layout = membership.join().layout
        state = OuterState(layout, spec.outer, pin_memory=False)

        def ask(state_round: int | None) -> Assignment:
            return membership.act(partial(client.assignment, worker=membership.worker, state_round=state_round))

        while (asked := ask(None)).action is not Action.RECOVER:
            if asked.action is Action.SEED:
                seeding.seed(membership, spec, Fragments(model, layout), state)
        for p in range(len(state)):  # state 0 is known to everybody here
            state.set(p, torch.zeros(layout.elements[p]), None)
        exchange = Exchange(membership, spec, state, torch.device("cpu"))
        for round_ in range(rounds):
            while (asked := ask(round_)).action is not Action.TRAIN:
                pass
            deltas = enumerate(delta.split(layout.elements))
            work = [Contribution(round_, p, asked.units, 1, 1, 1.0, 1.0, each) for p, each in deltas]
            say(at="ready")
            sys.stdin.readline()
            up, down = client.traffic.upload_bytes, client.traffic.download_bytes
            started = time.monotonic()
            flight = Flight(exchange, round_)
            for each in work:
                flight.send_made(each)
            flight.end()
            ended = time.monotonic()
            up, down = client.traffic.upload_bytes - up, client.traffic.download_bytes - down
            say(started=started, ended=ended, up=up, down=down)


def train(url: str, run: str, token: str, rank: int, elements: int, step_s: float, measured: int) -> None:
    """Train to the run's end. Return when the first inner step began, when `measured` rounds were over, and the seconds
    in steps between."""
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
    say(started=first, ended=ended, in_steps=in_steps)


if __name__ == "__main__":
    main()
