"""The leader of two coordinators is taken away again and again: how long until the clients go on, and whether anything
acknowledged is lost.

    python -m benchmarks.takeover [--faults 50] [--workers 8] [--crowd 0] [--json]
                                  [--kinds kill,pause,stop,database,aggregator]

PostgreSQL, SeaweedFS, two coordinators, two aggregators and a load balancer run on this machine, and workers of a small
model play rounds without a pause. A fault is one of

  kill        SIGKILL of the leader; it is started again once the other one leads
  pause       SIGSTOP of the leader, and SIGCONT once the other one leads
  stop        SIGTERM of the leader, as in an upgrade
  database    PostgreSQL crashes, and is started again at once
  aggregator  SIGKILL of one aggregator; it is started again once a round has been published

`away` is the time from the fault to the first request that the coordinators answer again (GET of the run); for
`aggregator`, to the publication of the round after the one that was open.

`--crowd N` adds N members of another run. Each sends a heartbeat every 5 s, directly to a coordinator, and tries the
next coordinator if that fails. A member waits from its first failed attempt to its next success.

The ledger is independent of the coordinators: it has every contribution that a worker got an acknowledgement for. When
the delta of a fragment is published, all of them must be among its contributors, and each worker must end with the
model that the coordinators report. One that is missing ends the benchmark with an error.
"""

import argparse
import asyncio
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

from harness.clients import Connection
from harness.cluster import Cluster, cluster
from harness.coordinator import Running
from harness.member import Member, spec_toml
from protocol.digest import StateHash, model_digest
from protocol.fragments import TensorSpec
from protocol.messages import JoinRequest, Metrics, Scope
from protocol.wire import DeltaHeader, Payload

RUN, CROWD = "takeover", "crowd"
# No round closes without a worker, so all of them have the same number of rounds.
PATIENT = "lease_s = 600\ngrace_min_s = 600\ngrace_max_s = 600"
BETWEEN_S = 2.0  # from the end of one fault to the next
HEARTBEAT_S, REPLY_S, RETRY_S = 5.0, 5.0, 0.5  # of a member of the crowd
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


class Crowd(threading.Thread):
    """Members that only send heartbeats. `waits`: of each member that could not, how many seconds."""

    def __init__(self, made: Cluster, members: int) -> None:
        super().__init__(name="crowd", daemon=True)
        made.running.create_run(spec_toml(CROWD, rounds=2, min_workers=members, members="lease_s = 60"))
        self.members, self.waits, self.refused = members, list[float](), list[str]()
        self._ports, self._token = [node.port for node in made.nodes], made.running.token(Scope.WORKER)
        self._joined, self._closing = threading.Event(), threading.Event()

    def run(self) -> None:
        asyncio.run(self._live())

    def await_all(self) -> None:
        while not self._joined.wait(1.0):
            if not self.is_alive():
                raise RuntimeError("the crowd could not join")

    def close(self) -> None:
        self._closing.set()
        self.join()

    async def _live(self) -> None:
        joining = asyncio.Semaphore(16)
        tokens = await asyncio.gather(*(self._join(number, joining) for number in range(self.members)))
        self._joined.set()
        await asyncio.gather(*(self._beat(number, token) for number, token in enumerate(tokens)))

    async def _join(self, number: int, joining: asyncio.Semaphore) -> str:
        body = JoinRequest(tensors=[TensorSpec(name="w", shape=[256])]).model_dump_json().encode()
        async with joining:
            connection = Connection(self._ports[0], self._token)
            status, answer, _ = await connection.ask("PUT", f"/v1/runs/{CROWD}/workers/c{number:04}", body)
            connection.close()
        if status != 200:
            raise RuntimeError(answer.decode())
        return str(json.loads(answer)["member_token"])

    async def _beat(self, number: int, token: str) -> None:
        body = Metrics(phase="train").model_dump_json().encode()
        turn, connection = number, None
        await asyncio.sleep(HEARTBEAT_S * number / self.members)
        while not self._closing.is_set():
            due, failed_at = time.monotonic() + HEARTBEAT_S, 0.0
            while not self._closing.is_set():
                connection = connection or Connection(self._ports[turn % len(self._ports)], token)
                try:
                    request = connection.ask("PUT", f"/v1/runs/{CROWD}/workers/c{number:04}/lease", body)
                    status, answer, _ = await asyncio.wait_for(request, REPLY_S)
                except (OSError, EOFError, TimeoutError) as error:
                    status, answer = 0, str(error).encode()
                if 0 < status < 300:
                    if failed_at:
                        self.waits.append(time.monotonic() - failed_at)
                    break
                if status in (401, 403, 404, 409):
                    self.refused.append(f"c{number:04}: {answer.decode()}")
                    return
                connection.close()
                connection, turn, failed_at = None, turn + 1, failed_at or time.monotonic()
                await asyncio.sleep(RETRY_S * (1 + number % 7 / 7))
            await asyncio.sleep(due - time.monotonic())


def inflict(made: Cluster, kind: str) -> Callable[[], None]:
    """Inflict a fault. Return what ends it once the coordinators answer again."""
    if kind == "aggregator":
        victim = made.aggregators[0]
        made.aggregators.append(made.aggregators.pop(0))  # they take turns
        victim.kill()
        return victim.start
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


def await_round(threads: list[Worker], round_: int, patience_s: float = 120.0) -> None:
    """Wait until every worker has the deltas of the round before `round_`."""
    give_up_at = time.monotonic() + patience_s
    while min(thread.round for thread in threads) < round_:
        if time.monotonic() > give_up_at or any(thread.error for thread in threads):
            raise TimeoutError(f"round {round_} does not begin: {[thread.error for thread in threads]}")
        time.sleep(0.01)


def measure(faults: int, workers: int, kinds: list[str], members: int = 0) -> dict[str, Any]:
    """Inflict `faults` faults, of each of `kinds` in turn, while `workers` train and `members` send heartbeats. Return
    how many seconds each took, and the totals of the ledger."""
    ledger = Ledger()
    away: defaultdict[str, list[float]] = defaultdict(list)
    with cluster(2) as made:
        for _ in range(2):
            made.add_aggregator()
        running = made.running
        crowd = Crowd(made, members) if members else None
        if crowd is not None:
            crowd.start()
            crowd.await_all()
        running.create_run(spec_toml(RUN, rounds=100_000, min_workers=workers, members=PATIENT))
        training = [Member(running.client(), RUN, f"w{index}") for index in range(workers)]
        for member in training:
            member.join(running.admin_token)
        assert training[0].assignment(None).action == "seed"
        training[0].seed()
        for member in training[1:]:
            for theta in member.theta:
                theta[:] = 0.5
        threads = [Worker(member, ledger) for member in training]
        for thread in threads:
            thread.start()
        for kind in itertools.islice(itertools.cycle(kinds), faults):
            time.sleep(BETWEEN_S)
            made.leader()
            for node in made.nodes:
                node.await_ready()
            began = time.monotonic()
            end = inflict(made, kind)
            if kind == "aggregator":
                await_round(threads, max(thread.round for thread in threads) + 2)
            else:
                await_answer(running)
            away[kind].append(time.monotonic() - began)
            end()
            if any(thread.error for thread in threads) or ledger.lost or (crowd and crowd.refused):
                break
        last = max(thread.round for thread in threads) + 1
        for thread in threads:
            thread.last = last
        for thread in threads:
            thread.join()
        digests = {thread.state_digest() for thread in threads}
        errors = [str(thread.error) for thread in threads if thread.error]
        if crowd is not None:
            crowd.close()
    return {
        "crowd": members,
        "crowd_waits_s": crowd.waits if crowd else [],
        "away_s": dict(away),
        "rounds": last + 1,
        "acknowledged": sum(map(len, ledger.acknowledged.values())),
        "retries": ledger.retries,
        "lost": ledger.lost,
        "errors": [*errors, *(crowd.refused if crowd else [])],
        "models": len(digests),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--crowd", type=int, default=0, help="members of another run")
    parser.add_argument("--kinds", default="kill,pause,stop,database,aggregator")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = measure(arguments.faults, arguments.workers, arguments.kinds.split(","), arguments.crowd)
    if arguments.json:
        print(json.dumps(found))
    else:
        table = Table("fault", "number", "median s", "p99 s", "longest s")
        for kind, seconds in found["away_s"].items():
            p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98] if len(seconds) > 1 else seconds[0]
            figures = (statistics.median(seconds), p99, max(seconds))
            table.add_row(kind, str(len(seconds)), *(f"{each:.1f}" for each in figures))
        Console().print(table)
        if waits := found["crowd_waits_s"]:
            print(
                f"{found['crowd']} members: {len(waits)} waits, median {statistics.median(waits):.1f} s, p99 "
                f"{statistics.quantiles(waits, n=100, method='inclusive')[98]:.1f} s, longest {max(waits):.1f} s"
            )
        print(
            f"{found['rounds']} rounds, {found['acknowledged']} acknowledged contributions, {found['retries']} retries"
        )
    if found["lost"] or found["errors"] or found["models"] != 1:
        raise SystemExit(f"lost: {found['lost']}; errors: {found['errors']}; models: {found['models']}")


if __name__ == "__main__":
    main()
