"""The demo with PostgreSQL, a bucket, two coordinators and two aggregators on this machine. Midway the leader and an
aggregator are killed. The final model must be that of the demo with one coordinator, which is trained first.

    python -m harness.demo_scale [--rounds N] [--workers N]
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from harness.cluster import Cluster, cluster
from outerstep import rest
from outerstep.cli.printing import console
from outerstep.demo import DemoPlan, train_on, trained
from outerstep.demo.processes import Processes
from outerstep.demo.spec import ROUNDS, RUN, demo_spec
from outerstep.live_view import display_for
from protocol.errors import OuterstepError

LOOK_S = 0.2


def train(plan: DemoPlan) -> str:
    """Train the demo with one coordinator. Return the digest of the final model."""
    with trained(plan, display_for(console())) as it:
        return str(it.run.state_digest)


def train_at_scale(plan: DemoPlan, rounds: int, say: Callable[[str], None]) -> str:
    """Train it with several coordinators and aggregators, of which one each is killed midway. Return the digest."""
    (plan.directory / "workers").mkdir()
    (plan.directory / "logs").mkdir()
    with cluster(2) as made:
        for _ in range(2):
            made.add_aggregator()
        running = made.running
        say(f"PostgreSQL, SeaweedFS, 2 coordinators and 2 aggregators are ready: {running.url}")
        killer = threading.Thread(target=_kill, args=(made, rounds // 3, say), daemon=True)
        killer.start()
        with (
            Processes(plan.directory / "logs") as processes,
            rest.connect(running.url, running.admin_token, trust_env=False) as client,
        ):
            run = train_on(client, running.url, processes, plan, display_for(console()))
        killer.join()
        return str(run.state_digest)


def _kill(made: Cluster, round_: int, say: Callable[[str], None]) -> None:
    """Kill the leader and an aggregator once the run is at `round_`."""
    with made.running.client() as client:
        while True:
            with suppress(Exception):
                if client.get(f"/v1/runs/{RUN}").json()["round"] >= round_:
                    break
            time.sleep(LOOK_S)
    leader, began = made.leader(), time.monotonic()
    leader.kill()
    made.aggregators[0].kill()
    while (new := made.leader()) is leader:
        time.sleep(LOOK_S)
    say(
        f"in round {round_}: killed {leader.name}, which led, and {made.aggregators[0].name}; {new.name} leads after "
        f"{time.monotonic() - began:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args()
    spec = demo_spec(workers=given.workers, rounds=given.rounds, codec="int8")

    def say(line: str) -> None:
        print(line, flush=True)

    try:
        with tempfile.TemporaryDirectory(prefix="outerstep-demo-scale-") as folder:
            plans = [DemoPlan(given.workers, spec, Path(folder) / name) for name in ("alone", "scale")]
            for plan in plans:
                plan.directory.mkdir()
            digests = [train(plans[0]), train_at_scale(plans[1], given.rounds, say)]
    except OuterstepError as error:
        sys.exit(f"demo-scale: {error}")
    say(f"the final model with one coordinator  {digests[0]}")
    say(f"                with all these        {digests[1]}")
    if digests[0] != digests[1]:
        sys.exit("demo-scale: they differ")
    say("they are the same, bit for bit")


if __name__ == "__main__":
    main()
