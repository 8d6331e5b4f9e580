"""`outerstep plan` compared with real syncs: two workers behind slow lines, a coordinator, and the cost of each round.

    python -m benchmarks.plan [--quick] [--json]

The lines are those of harness/lines.py, with CUBIC at both ends. The planner gets what a speed test of such a line
would show: the payload of full packets. The workers are real, with a model of one vector, a random gradient and one
inner step per round. Seconds and bytes are those that the workers report (GET /v1/runs/{run}/rounds/{n}, stage `sync`):
medians over the rounds after the first one, which opens connections and allocates memory.

Needs root, iproute2 and a C compiler; exit code 3 if such lines cannot be made.
"""

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.wan.measuring import bench
from harness.lines import NO_LINES_EXIT, Shape, on_the_wire, why_not
from outerstep import plan
from outerstep.plan import Workload
from protocol.messages import RoundDetail, Stage

WORKERS, ROUNDS = 2, 4

SPEC = """
name = "{name}"
[model]
factory = "none:none"
[data]
source = "custom"
[sync]
wait = "always"
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
    """A case: codecs, Mbit/s, round trip in milliseconds, most elements per fragment."""

    up_codec: str
    down_codec: str
    parameters: int
    up_mbit: float
    down_mbit: float
    latency_ms: float
    fragment: int

    @property
    def shape(self) -> Shape:
        return Shape(self.up_mbit, self.down_mbit, self.latency_ms / 1e3)

    @property
    def workload(self) -> Workload:
        up, down = (mbit * 1e6 / on_the_wire(1) for mbit in (self.up_mbit, self.down_mbit))
        return Workload(self.parameters, up, down, 1.0, WORKERS, self.latency_ms / 1e3, 1000)


QUICK = [
    Case("int8", "int8", 4_000_000, 10, 100, 40, 1 << 20),  # limited by the upload
    Case("int8", "int8", 4_000_000, 100, 10, 40, 1 << 20),  # limited by the download
]
FULL = [
    *QUICK,
    Case("int8", "int8", 8_000_000, 20, 20, 40, 1 << 22),  # two large fragments: only start and end of the pipeline
    Case("bf16", "int8", 4_000_000, 20, 20, 40, 1 << 20),
    Case("int8", "int8", 1_000_000, 20, 20, 300, 1 << 15),  # many small fragments, high latency
]


def measure(case: Case, name: str) -> dict[str, Any]:
    """Run a case; return the predicted and the measured values."""
    workload = case.workload
    with bench(case.shape, "cubic", workers=WORKERS) as made:
        codecs = {"up": case.up_codec, "down": case.down_codec}
        made.running.create_run(
            SPEC.format(name=name, rounds=ROUNDS, fragment=case.fragment, workers=WORKERS, **codecs)
        )
        made.order("train", name, elements=case.parameters, step_s=0.0, measured=ROUNDS)
        for worker in made.workers:
            worker.answer()
        with made.running.client() as http:
            rounds = [
                RoundDetail.model_validate_json(http.get(f"/v1/runs/{name}/rounds/{number}").raise_for_status().content)
                for number in range(1, ROUNDS)
            ]
    accounts = [account for each in rounds for account in each.accounts.values()]
    exchange = plan.sync_cost(workload, case.up_codec, case.down_codec, fragment=case.fragment)
    measured = {
        "upload_bytes": statistics.median(account.upload_bytes for account in accounts),
        "download_bytes": statistics.median(account.download_bytes for account in accounts),
        "sync_s": statistics.median(account.seconds[Stage.SYNC] for account in accounts),
    }
    predicted = {key: asdict(exchange)[key] for key in measured}
    off = {key: predicted[key] / measured[key] - 1 for key in measured}
    stages = {stage: statistics.median(each.seconds.get(stage, 0.0) for each in accounts) for stage in Stage}
    figures = {"predicted": predicted, "measured": measured, "off": off, "stages": stages}
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
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two cases, in less than a minute")
    parser.add_argument("--json", action="store_true", help="add one line of JSON with all figures")
    arguments = parser.parse_args()
    if reason := why_not():
        print(f"Slow lines are not available on this machine: {reason}.", file=sys.stderr)
        return NO_LINES_EXIT
    cases = QUICK if arguments.quick else FULL
    results = [measure(case, f"plan-{number}") for number, case in enumerate(cases)]
    Console(width=140).print(table(results))
    if arguments.json:
        print(json.dumps({"benchmark": "plan", "cpus": os.cpu_count(), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
