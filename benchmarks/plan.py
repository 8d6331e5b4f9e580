"""`outerstep plan` against real syncs: two workers behind slow lines, a coordinator, and what each round cost them.

    python -m benchmarks.plan [--quick] [--json]

The lines are a relay of ours (benchmarks/line.py), so their rates are of payloads, without TCP's own bytes. The workers
are real ones with a model of one vector and a random gradient; one inner step per round. Seconds and bytes are those
that the workers tell the coordinator (GET /v1/runs/{run}/rounds/{n}), the stage `sync`; the median over the rounds
after the first, in which connections are opened and memory is taken. `other B`: bytes per fragment and sync, up and
down, that passed and were no payload.
"""

import argparse
import json
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.harness.coordinator import Running, coordinator_process
from benchmarks.line import SlowLine
from outerstep import plan
from outerstep.plan import Workload
from protocol.messages import RoundDetail, RunDetail, Stage
from worker.diloco import DiLoCo

WORKERS, ROUNDS = 2, 4

SPEC = """
name = "{name}"
[model]
factory = "none:none"
[data]
source = "custom"
[sync]
rounds = {rounds}
inner_steps = 1
upload_codec = "{up}"
download_codec = "{down}"
fragment_elements = {fragment}
[members]
min_workers = {workers}
lease_s = 600
[checkpoints]
every_rounds = 1000
"""


@dataclass(frozen=True)
class Case:
    """A case to run: codecs, Mbit/s, milliseconds of a round trip, elements per fragment at most."""

    up_codec: str
    down_codec: str
    parameters: int
    up_mbit: float
    down_mbit: float
    latency_ms: float
    fragment: int

    @property
    def workload(self) -> Workload:
        latency_s = self.latency_ms / 1e3
        return Workload(self.parameters, self.up_mbit * 1e6, self.down_mbit * 1e6, 1.0, WORKERS, latency_s, 1000)


QUICK = [
    Case("int8", "int8", 4_000_000, 10, 100, 40, 1 << 20),  # the upload is what takes time
    Case("int8", "int8", 4_000_000, 100, 10, 40, 1 << 20),  # the download is
]
FULL = [
    *QUICK,
    Case("int8", "int8", 8_000_000, 20, 20, 40, 1 << 22),  # two large fragments: all fill and tail
    Case("bf16", "int8", 4_000_000, 20, 20, 40, 1 << 20),
    Case("int8", "int8", 1_000_000, 20, 20, 300, 1 << 15),  # many small fragments and a long way
]


class Vector(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(n))


def train(url: str, run: str, token: str, rank: int, parameters: int) -> None:
    """Train as one worker: each round is one step by the same random gradient, so that only the sync takes long."""
    model = Vector(parameters)
    model.values.grad = torch.randn(parameters, generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    name = f"worker-{rank}"
    with DiLoCo.connect(model, optimizer, url=url, run=run, token=token, name=name, state_dir=None) as diloco:
        for _ in diloco.units():
            optimizer.step()


def measure(coordinator: Running, case: Case, name: str) -> dict[str, Any]:
    """Run one case. Return what was predicted and what was measured."""
    spec = SPEC.format(
        name=name, rounds=ROUNDS, up=case.up_codec, down=case.down_codec, fragment=case.fragment, workers=WORKERS
    )
    coordinator.create_run(spec)
    port, workload = coordinator.port, case.workload
    with ExitStack() as resources:
        http = resources.enter_context(coordinator.client())
        lines = [
            resources.enter_context(SlowLine(port, up=workload.up, down=workload.down, latency_s=workload.latency_s))
            for _ in range(WORKERS)
        ]
        workers = resources.enter_context(ThreadPoolExecutor(WORKERS, "worker"))
        ended = [
            workers.submit(train, line.url, name, coordinator.admin_token, rank, case.parameters)
            for rank, line in enumerate(lines)
        ]
        for each in ended:
            each.result()
        rounds = [
            RoundDetail.model_validate_json(http.get(f"/v1/runs/{name}/rounds/{number}").raise_for_status().content)
            for number in range(1, ROUNDS)
        ]
        total = RunDetail.model_validate_json(http.get(f"/v1/runs/{name}").raise_for_status().content)
    accounts = [account for each in rounds for account in each.accounts.values()]
    exchange = plan.exchange(workload, case.up_codec, case.down_codec, fragment=case.fragment)
    measured = {
        "upload_bytes": statistics.median(account.upload_bytes for account in accounts),
        "download_bytes": statistics.median(account.download_bytes for account in accounts),
        "sync_s": statistics.median(account.seconds[Stage.SYNC] for account in accounts),
    }
    syncs = WORKERS * ROUNDS * (total.fragments or 1)
    heads = {  # what passed and is no payload: HTTP's heads and JSON, joining and asking included
        "up": (sum(line.up.bytes for line in lines) - total.account.upload_bytes) / syncs,
        "down": (sum(line.down.bytes for line in lines) - total.account.download_bytes) / syncs,
    }
    predicted = {key: asdict(exchange)[key] for key in measured}
    off = {key: predicted[key] / measured[key] - 1 for key in measured}
    stages = {stage: statistics.median(each.seconds.get(stage, 0.0) for each in accounts) for stage in Stage}
    figures = {"predicted": predicted, "measured": measured, "off": off, "stages": stages, "head_bytes": heads}
    return {"case": asdict(case), **figures}


def table(results: list[dict[str, Any]]) -> Table:
    shown = Table(title=f"{WORKERS} workers, predicted / measured per sync", title_justify="left")
    shown.add_column("up, down")
    for column in (
        "parameters",
        "fragments of",
        "Mbit/s up, down",
        "ms",
        "MB up",
        "MB down",
        "seconds",
        "off",
        "other B",
    ):
        shown.add_column(column, justify="right")
    for each in results:
        case, predicted, measured = each["case"], each["predicted"], each["measured"]
        shown.add_row(
            f"{case['up_codec']}, {case['down_codec']}",
            f"{case['parameters']:,}",
            f"{case['fragment']:,}",
            f"{case['up_mbit']:g}, {case['down_mbit']:g}",
            f"{case['latency_ms']:g}",
            f"{predicted['upload_bytes'] / 1e6:.2f} / {measured['upload_bytes'] / 1e6:.2f}",
            f"{predicted['download_bytes'] / 1e6:.2f} / {measured['download_bytes'] / 1e6:.2f}",
            f"{predicted['sync_s']:.2f} / {measured['sync_s']:.2f}",
            f"{each['off']['sync_s']:+.1%}",
            f"{each['head_bytes']['up']:.0f}, {each['head_bytes']['down']:.0f}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cases, in less than a minute")
    parser.add_argument("--json", action="store_true", help="add one line of JSON with all figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with coordinator_process() as coordinator:
        cases = QUICK if arguments.quick else FULL
        results = [measure(coordinator, case, f"plan-{number}") for number, case in enumerate(cases)]
    Console(width=140).print(table(results))
    if arguments.json:
        print(json.dumps({"benchmark": "plan", "cpus": os.cpu_count(), "results": results}))


if __name__ == "__main__":
    main()
