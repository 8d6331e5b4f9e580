"""A run with hostile workers on a real coordinator: real workers, over HTTP, in threads of this process."""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.robust.ascent import Ascent, HostileRelease, Plan
from harness.coordinator import CoordinatorProcess, InProcess
from protocol.messages import RunDetail, Scope
from protocol.spec.run import parse_spec
from worker.box import set_up
from worker.diloco import DiLoCo, Joined
from worker.link.client import Client, open_http
from worker.settings import BoxSettings
from worker.train import train

RUN = "robust"
SPEC = """
name = "robust"
seed = {seed}
[model]
preset = "tiny"
[data]
source = "python-stdlib"
sequence_length = 64
[inner]
batch_size = 8
warmup_steps = 40
[sync]
rounds = {rounds}
inner_steps = 25
fragment_elements = 50_000
upload_codec = "{codec}"
aggregation = "{rule}"
[members]
min_workers = {workers}
[evaluation]
max_tokens = {evaluation_tokens}
[guard]
action = "{guard}"
"""


class HostileDiLoCo(DiLoCo):
    """A worker that attacks once it has joined. `attack`: makes the attack, for the state and the run's spec."""

    ascent: Ascent

    def _join(self, resources: ExitStack) -> Joined:
        joined = super()._join(resources)
        joined.rounds._exchange.release = HostileRelease(self.ascent, joined.state)
        return joined


@dataclass
class Worker(threading.Thread):
    running: InProcess
    name_: str
    folder: Path
    token: str
    attack: Any = None
    stop: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        super().__init__(name=self.name_)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        try:
            torch.set_num_threads(1)
            with open_http(self.running.url) as http:
                client = Client(http, RUN, self.token, stop=self.stop)
                run = client.run_detail()
                settings = BoxSettings(name=self.name_, device="cpu", threads=1, state_dir=self.folder)
                box = set_up(run.spec, settings, torch.device("cpu"), stop=self.stop)
                kind = DiLoCo if self.attack is None else HostileDiLoCo
                diloco = kind(
                    box.model,
                    box.optimizers,
                    client=client,
                    run=run,
                    name=self.name_,
                    data=box.data.summary,
                    evaluate=box.evaluate,
                    tell="nothing",
                )
                if self.attack is not None:
                    diloco.ascent = self.attack(run.spec, box)
                with closing(box.data), diloco:
                    train(diloco, box, None)
        except BaseException as error:
            self.error = error
            print(f"{self.name_}: {error!r}", file=sys.stderr, flush=True)


def events(running: InProcess) -> list[dict[str, Any]]:
    found, after = [], "0"
    with running.client() as http:
        while after is not None:
            page = http.get(f"/v1/runs/{RUN}/events?limit=1000&after={after}").raise_for_status().json()
            found += page["items"]
            after = page["next"]
    return found


def play(given: argparse.Namespace, plan: Plan | None, hostile: int, absent: bool) -> dict[str, Any]:
    began = time.monotonic()
    workers_n = given.workers - (hostile if absent else 0)
    with tempfile.TemporaryDirectory(prefix="outerstep-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        coordinator = CoordinatorProcess(folder / "data")
        stack.callback(coordinator.stop)
        running = coordinator.start()
        text = SPEC.format(
            seed=given.seed,
            rounds=given.rounds,
            codec=given.codec,
            rule=given.rule,
            workers=workers_n,
            evaluation_tokens=given.evaluation_tokens,
            guard=given.guard,
        )
        running.create_run(text)
        shared: list[Ascent] = []
        lock = threading.Lock()

        def attack(spec: Any, box: Any) -> Ascent:
            with lock:
                if not shared:
                    from protocol.fragments import plan_fragments
                    from worker.state.parameters import tensor_specs

                    layout = spec.sync.plan_layout(tensor_specs(box.model))
                    shared.append(Ascent(plan, spec, box.data, layout, hostile, given.workers))
                return shared[0]

        workers = [
            Worker(
                running,
                f"w{i}",
                folder / f"w{i}",
                running.token(Scope.WORKER, names=3),
                attack if plan is not None and i < hostile and not absent else None,
            )
            for i in range(hostile if absent else 0, given.workers)
        ]
        for each in workers:
            each.start()
        while any(each.is_alive() for each in workers):
            time.sleep(0.2)
            with running.client() as http:
                detail = RunDetail.model_validate(http.get(f"/v1/runs/{RUN}").raise_for_status().json())
            if detail.state == "paused" or any(each.error for each in workers):
                for each in workers:
                    each.stop.set()
        with running.client() as http:
            detail = RunDetail.model_validate(http.get(f"/v1/runs/{RUN}").raise_for_status().json())
            rounds = http.get(f"/v1/runs/{RUN}/rounds?limit=1000").raise_for_status().json()["items"]
            verdicts = (
                [http.get(f"/v1/runs/{RUN}/rounds/{each['round']}").json().get("verdicts") for each in rounds]
                if given.verdicts
                else []
            )
        found = events(running)
        if given.events:
            for each in found:
                print(each["kind"], each["message"], file=sys.stderr)
        losses = [
            [e["data"]["round"], float(e["message"].split("held-out loss ")[1].split()[0])]
            for e in found
            if e["kind"] == "evaluated"
        ]
        return {
            "state": str(detail.state),
            "round": detail.round,
            "loss": detail.held_out_loss,
            "losses": losses,
            "verdicts": verdicts,
            "events": [
                [e["kind"], e["message"]]
                for e in found
                if e["kind"] in ("screened", "quarantined", "spoilt", "suspected", "rolled-back", "banned")
            ],
            "seconds": round(time.monotonic() - began, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--hostile", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--rule", default="screened")
    parser.add_argument("--guard", default="tell")
    parser.add_argument("--evaluation-tokens", type=int, default=16384)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--length", type=float, default=1.2)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--reach", type=float, default=1.0)
    parser.add_argument("--who", default="attack", choices=["attack", "absent", "honest"])
    parser.add_argument("--events", action="store_true")
    parser.add_argument("--verdicts", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan(given.share, given.length, given.every, given.steps, given.reach) if given.who == "attack" else None
    print(json.dumps(play(given, plan, given.hostile, given.who == "absent")))


if __name__ == "__main__":
    main()
