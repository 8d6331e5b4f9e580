"""The leader of two coordinators is taken away again and again: how long until the clients go on, and whether anything
acknowledged is lost.

    python -m benchmarks.takeover [--faults 50] [--workers 8] [--kinds kill,pause,stop,database] [--json]

PostgreSQL, SeaweedFS, two coordinators and a load balancer run on this machine, and workers of a small model play
rounds without a pause. A fault is one of

  kill       SIGKILL of the leader; it is started again once the other one leads
  pause      SIGSTOP of the leader, and SIGCONT once the other one leads
  stop       SIGTERM of the leader, as in an upgrade
  database   PostgreSQL crashes, and is started again at once

`away` is the time from the fault to the first request that the coordinators answer again (GET of the run).

The ledger is independent of the coordinators: it has every contribution that a worker got an acknowledgement for. When
the delta of a fragment is published, all of them must be among its contributors, and each worker must end with the
model that the coordinators report. One that is missing ends the benchmark with an error.
"""

import argparse
import itertools
import json
import math
import signal
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
from rich.console import Console
from rich.table import Table

from harness.cluster import Cluster, cluster
from harness.coordinator import Running
from harness.member import Member, spec_toml
from protocol.digest import StateHash, model_digest
from protocol.wire import DeltaHeader, Payload

RUN = "takeover"
# No round closes without a worker, so all of them have the same number of rounds.
PATIENT = "lease_s = 600\ngrace_min_s = 600\ngrace_max_s = 600"
BETWEEN_S = 2.0  # from the end of one fault to the next
Answer = TypeVar("Answer")


@dataclass
class Ledger:
    """What was acknowledged, by round and fragment, and what the published deltas are made of. Thread-safe."""

    acknowledged: defaultdict[tuple[int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    published: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    retries: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def acknowledge(self, round_: int, fragment: int, worker: str) -> None:
        with self.lock:
            self.acknowledged[round_, fragment].add(worker)

    def publish(self, round_: int, fragment: int, contributors: set[str]) -> None:
        """Compare a delta with what was acknowledged before."""
        with self.lock:
            key = (round_, fragment)
            if contributors != self.published.setdefault(key, contributors):
                self.lost.append(f"round {round_}, fragment {fragment} was published twice, with other contributors")
            for worker in self.acknowledged[key] - contributors:
                self.lost.append(
                    f"round {round_}, fragment {fragment}: the contribution of {worker} is not in the delta"
                )


class Worker(threading.Thread):
    """Plays rounds, until it has played round `last`."""

    def __init__(self, member: Member, ledger: Ledger) -> None:
        super().__init__(name=member.name)
        self.member, self.ledger = member, ledger
        self.round = 0
        self.last = math.inf
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while self.round <= self.last:
                self._play(self.round)
                self.round += 1
        except BaseException as error:
            self.error = error
            raise

    def _play(self, round_: int) -> None:
        member = self.member
        while (assignment := self._retried(lambda: member.assignment(round_, wait_s=20))).action != "train":
            pass
        for fragment, values in enumerate(member.pseudo_gradients(round_)):
            self._retried(lambda p=fragment, v=values: member.contribute(assignment, p, v).raise_for_status())  # type: ignore[misc]
            self.ledger.acknowledge(round_, fragment, member.name)
        for fragment in range(len(member.theta)):
            delta = self._retried(lambda p=fragment: member.delta(round_, p).raise_for_status())  # type: ignore[misc]
            payload = Payload.from_bytes(delta.content)
            assert isinstance(payload.header, DeltaHeader)
            self.ledger.publish(round_, fragment, {each.worker for each in payload.header.contributors})
            member.apply(fragment, payload)

    def _retried(self, act: Callable[[], Answer]) -> Answer:
        """Repeat a request as a worker does: after faults of the line, and answers that ask for it."""
        while True:
            try:
                return act()
            except httpx.TransportError:
                pass
            except httpx.HTTPStatusError as error:
                if error.response.status_code not in (404, 429, 500, 502, 503, 507):
                    raise RuntimeError(error.response.text) from error
            self.ledger.retries += 1
            time.sleep(0.2)

    def state_digest(self) -> str:
        """Return the digest of the worker's model."""
        fragments = []
        for theta, momentum in zip(self.member.theta, self.member.momentum, strict=True):
            state = StateHash()
            state.update(theta.data, momentum.data)
            fragments.append(state.digest())
        return model_digest(fragments).hex()


def inflict(made: Cluster, kind: str) -> Callable[[], None]:
    """Inflict a fault. Return what ends it once the coordinators answer again."""
    if kind == "database":
        made.database.kill()
        made.database.start()
        return lambda: None
    leader = made.leader()
    if kind == "pause":
        leader.send(signal.SIGSTOP)
        return lambda: leader.send(signal.SIGCONT)
    (leader.kill if kind == "kill" else leader.stop)()
    return leader.start


def await_answer(running: Running, patience_s: float = 120.0) -> None:
    """Wait until the coordinators answer."""
    give_up_at = time.monotonic() + patience_s
    while time.monotonic() < give_up_at:
        try:
            with running.client() as client:
                if client.get(f"/v1/runs/{RUN}", timeout=5).is_success:
                    return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"no answer for {patience_s:.0f} s")


def measure(faults: int, workers: int, kinds: list[str]) -> dict[str, Any]:
    """Inflict `faults` faults, of each of `kinds` in turn, while `workers` train. Return how many seconds each took,
    and the totals of the ledger."""
    ledger = Ledger()
    away: defaultdict[str, list[float]] = defaultdict(list)
    with cluster(2) as made:
        running = made.running
        running.create_run(spec_toml(RUN, rounds=100_000, min_workers=workers, members=PATIENT))
        members = [Member(running.client(), RUN, f"w{index}") for index in range(workers)]
        for member in members:
            member.join(running.admin_token)
        assert members[0].assignment(None).action == "seed"
        members[0].seed()
        for member in members[1:]:
            for theta in member.theta:
                theta[:] = 0.5
        threads = [Worker(member, ledger) for member in members]
        for thread in threads:
            thread.start()
        for kind in itertools.islice(itertools.cycle(kinds), faults):
            time.sleep(BETWEEN_S)
            made.leader()
            for node in made.nodes:
                node.await_ready()
            began = time.monotonic()
            end = inflict(made, kind)
            await_answer(running)
            away[kind].append(time.monotonic() - began)
            end()
            if any(thread.error for thread in threads) or ledger.lost:
                break
        last = max(thread.round for thread in threads) + 1
        for thread in threads:
            thread.last = last
        for thread in threads:
            thread.join()
        digests = {thread.state_digest() for thread in threads}
        errors = [str(thread.error) for thread in threads if thread.error]
    return {
        "away_s": dict(away),
        "rounds": last + 1,
        "acknowledged": sum(map(len, ledger.acknowledged.values())),
        "retries": ledger.retries,
        "lost": ledger.lost,
        "errors": errors,
        "models": len(digests),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--kinds", default="kill,pause,stop,database")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.faults, arguments.workers, arguments.kinds.split(","))
    if arguments.json:
        print(json.dumps(found))
    else:
        table = Table("fault", "number", "median s", "p99 s", "longest s")
        for kind, seconds in found["away_s"].items():
            p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98] if len(seconds) > 1 else seconds[0]
            figures = (statistics.median(seconds), p99, max(seconds))
            table.add_row(kind, str(len(seconds)), *(f"{each:.1f}" for each in figures))
        Console().print(table)
        print(
            f"{found['rounds']} rounds, {found['acknowledged']} acknowledged contributions, {found['retries']} retries"
        )
    if found["lost"] or found["errors"] or found["models"] != 1:
        raise SystemExit(f"lost: {found['lost']}; errors: {found['errors']}; models: {found['models']}")


if __name__ == "__main__":
    main()
