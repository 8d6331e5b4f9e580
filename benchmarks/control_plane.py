"""A thousand workers on one coordinator with one core: the latency of heartbeats, and missed leases.

    python -m benchmarks.control_plane [--quick] [--json] [--workers 1000] [--round-s 30] [--viewers 200] [--postgresql]

The coordinator is an ordinary process, pinned to one core. The workers are coroutines of this process on the other
cores, with two connections each, like `outerstep worker`. One connection renews the lease every 5 s. The other one goes
through rounds of a model of 256 parameters: it requests its assignment (a long poll of 5 s), waits as long as inner
steps would take, contributes, and requests the delta (a long poll). The measurement covers two rounds, from the opening
of the first. Reported are, in milliseconds,

  heartbeat      from request to response
  nothing yet    of long polls that end without news: the delay beyond the requested 5 s
  contribute     from request to response; the contribution is durable by then
  woken          of long polls that end with news: the delay after the first worker that got the same news
  asked          of long polls with news at once: from request to response

With `--postgresql` the coordinator has its database in PostgreSQL and its blobs in SeaweedFS, both on the other cores.

Targets: p99 of heartbeats ≤ 100 ms (they are spread evenly over time), no missed lease, peak RSS ≤ 300 MB. `own lag` is
how late this process woke up from short sleeps, which it adds to all other figures.

With `--viewers`, the same is measured twice more: with this many streams of the run's events, which must deliver every
event; and with this many dashboards, which have such a stream and send the page's requests. `look` is a refresh of a
dashboard, from its first request to the last response. Target: streams do not change the p99 of heartbeats.
"""

import argparse
import asyncio
import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from harness.clients import Connection, Viewer
from harness.cluster import cluster
from harness.coordinator import InProcess, Running, coordinator_process
from harness.member import Member
from protocol.digest import content_digest, digest
from protocol.fragments import TensorSpec
from protocol.messages import (
    Action,
    Assignment,
    AssignmentRequest,
    JoinRequest,
    Metrics,
    RoundReport,
    Scope,
    Stage,
)

HEARTBEAT_S = 5.0
WAIT_S = 5
JOINS_AT_ONCE = 16
VIEWERS_PER_S = 40
LAST_EVENT_IN_S = 15.0
KINDS = ("heartbeat", "nothing yet", "contribute", "woken", "asked", "look", "own lag")
ZEROS = np.zeros(256, np.float32)  # every worker's pseudo-gradient: the state stays the same, so no worker has to step
TENSORS = [TensorSpec(name="w", shape=[len(ZEROS)])]

SPEC = """
name = "crowd"
[model]
factory = "none:none"
[data]
source = "custom"
[sync]
wait = "always"
rounds = 100000
inner_steps = 1
[members]
min_workers = {workers}
lease_s = {lease_s}
"""


@dataclass
class Crowd:
    """The state that the workers share, and their measurements: seconds by kind."""

    member: Member  # creates the payloads of all workers
    round_s: float
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    heard: dict[tuple[str, int], float] = field(default_factory=dict)  # news -> when the first worker got them
    began: float = field(default_factory=time.perf_counter)
    missed_leases: int = 0

    def note(self, kind: str, seconds: float) -> None:
        if ("assignment", 0) in self.heard:
            self.seconds[kind].append(seconds)


@dataclass
class Worker:
    """One worker, with a connection for the rounds and one for the heartbeats."""

    crowd: Crowd
    name: str
    main: Connection
    side: Connection

    async def ask(self, connection: Connection, *request: Any) -> tuple[int, bytes, float]:
        status, body, took = await connection.ask(*request)
        if status == 401:
            self.crowd.missed_leases += 1
        if status >= 400 and b":not-published" not in body:
            raise RuntimeError(f"{self.name}: {body.decode()}")
        return status, body, took

    async def heartbeats(self, offset: float) -> None:
        body = Metrics(phase="train").model_dump_json().encode()
        # Spread evenly over the interval, whenever the worker joined.
        due = self.crowd.began + HEARTBEAT_S * offset
        while due < time.perf_counter():
            due += HEARTBEAT_S
        while True:
            await asyncio.sleep(due - time.perf_counter())
            due += HEARTBEAT_S
            _, _, took = await self.ask(self.side, "PUT", f"/v1/runs/crowd/workers/{self.name}/lease", body)
            self.crowd.note("heartbeat", took)

    async def rounds(self, offset: float) -> None:
        """Go through two rounds and the beginning of the third; contribute at `offset` of each, from 0 to 1."""
        for round_ in range(3):
            report = None if round_ == 0 else _report(round_ - 1)
            request = AssignmentRequest(state_round=round_, carried=[], report=report).model_dump_json().encode()
            path = f"/v1/runs/crowd/workers/{self.name}/assignment"
            answer = await self._poll(("assignment", round_), "PUT", path, request)
            if round_ == 2:
                return
            assignment = Assignment.model_validate_json(answer)
            if assignment.action is not Action.TRAIN:
                raise RuntimeError(f"{self.name} got the assignment {assignment.action}: {assignment.reason}")
            opened = self.crowd.heard["assignment", round_]
            await asyncio.sleep(opened + self.crowd.round_s * offset - time.perf_counter())
            await self._contribute(assignment)
            path = f"/v1/runs/crowd/rounds/{round_}/fragments/0/delta"
            await self._poll(("delta", round_), "GET", path, b"")

    async def _poll(self, news: tuple[str, int], *request: Any) -> bytes:
        """Send long polls until one ends with `news`."""
        while True:
            status, body, took = await self.ask(self.main, *request, f"Prefer: wait={WAIT_S}")
            if status == 404 or b'"action":"wait"' in body:
                self.crowd.note("nothing yet", max(took - WAIT_S, 0))
                continue
            now = time.perf_counter()
            first = self.crowd.heard.setdefault(news, now)
            was_waiting = now - took < first
            self.crowd.note("woken" if was_waiting else "asked", now - first if was_waiting else took)
            return body

    async def _contribute(self, assignment: Assignment) -> None:
        self.crowd.member.name = self.name
        body = self.crowd.member.payload(assignment, 0, ZEROS)
        path = self.crowd.member.contribution_path(assignment.round, 0)
        headers = f"Content-Digest: {content_digest(digest(body))}"
        _, _, took = await self.ask(self.main, "PUT", path, body, headers)
        self.crowd.note("contribute", took)


def _report(round_: int) -> RoundReport:
    """Return a worker's report on the previous round, sent as it asks for the next."""
    seconds = dict.fromkeys((Stage.TRAIN, Stage.SYNC, Stage.ENCODE, Stage.UPLOAD, Stage.DOWNLOAD), 1.0)
    return RoundReport(round=round_, epoch=1, upload_bytes=1000, download_bytes=1000, seconds=seconds)


async def measure(
    running: Running, workers: int, round_s: float, viewers: int = 0, pages: bool = False
) -> dict[str, Any]:
    """Let all workers join and run two rounds, with `viewers` of dashboards (`pages`) or of event streams alone. Return
    the crowd's figures.

    Raises RuntimeError if a viewer missed an event.
    """
    token, port = running.token(Scope.WORKER), running.port
    running.create_run(SPEC.format(workers=workers, lease_s=3 * HEARTBEAT_S))
    with running.client() as http:
        member = Member(http, "crowd", "w0000", TENSORS, data=None)
        crowd = Crowd(member, round_s)
        join_request = JoinRequest(tensors=TENSORS).model_dump_json().encode()
        queue = list(range(1, workers))
        beating: list[asyncio.Task[None]] = []
        crowded: list[Worker] = []

        def begin(number: int, member_token: str) -> None:
            connections = (Connection(port, member_token) for _ in range(2))
            worker = Worker(crowd, f"w{number:04}", *connections)
            crowded.append(worker)
            beating.append(group.create_task(worker.heartbeats(number / workers)))

        async def join_some() -> None:
            connection = Connection(port, token)
            while queue:
                number = queue.pop()
                status, body, _ = await connection.ask("PUT", f"/v1/runs/crowd/workers/w{number:04}", join_request)
                if status != 200:
                    raise RuntimeError(body.decode())
                begin(number, json.loads(body)["member_token"])

        async with asyncio.TaskGroup() as group:
            beating.append(group.create_task(_note_own_lag(crowd)))
            started = time.perf_counter()
            begin(0, member.join(token).member_token)
            await asyncio.gather(*(join_some() for _ in range(JOINS_AT_ONCE)))
            joined_s = time.perf_counter() - started
            first = _events(http)[-1]["id"]
            audience = [Viewer(port, running.token(Scope.VIEWER), "crowd", first) for _ in range(viewers)]
            for seat, viewer in enumerate(audience):
                beating.append(group.create_task(viewer.listen()))
                if pages:
                    beating.append(group.create_task(viewer.refresh_until_cancelled(seat / VIEWERS_PER_S)))
            await asyncio.sleep(viewers / VIEWERS_PER_S)
            member.assignment(None)
            member.seed(0.0)
            await asyncio.gather(*(worker.rounds(rank / workers) for rank, worker in enumerate(crowded)))
            happened = [event["id"] for event in _events(http) if event["id"] > first]
            await asyncio.sleep(LAST_EVENT_IN_S if viewers else 0)
            for task in beating:
                task.cancel()
        for viewer in audience:
            if viewer.events[: len(happened)] != happened:
                raise RuntimeError(f"a viewer heard of {viewer.events}, and what happened was {happened}")
            crowd.seconds["look"] += viewer.seconds
        lost = [event for event in _events(http) if event["kind"] == "lost"]
    figures = {
        kind: {
            "count": len(crowd.seconds[kind]),
            **{
                name: round(1000 * float(np.quantile(crowd.seconds[kind], q)), 1)
                for name, q in (("p50_ms", 0.5), ("p99_ms", 0.99), ("max_ms", 1.0))
            },
        }
        for kind in KINDS
        if crowd.seconds[kind]
    }
    return {
        "workers": workers,
        "join_s": round(joined_s, 1),
        "seconds": round(crowd.heard["assignment", 2] - crowd.heard["assignment", 0], 1),
        "missed_leases": crowd.missed_leases + len(lost),
        "viewers": viewers,
        "dashboards": pages,
        "viewers_requests": sum(viewer.requests for viewer in audience),
        "kinds": figures,
    }


def _events(http: httpx.Client) -> list[dict[str, Any]]:
    """Return all events."""
    events: list[dict[str, Any]] = []
    while page := http.get(f"/v1/runs/crowd/events?limit=1000&after={events[-1]['id'] if events else 0}").json():
        events += page["items"]
        if page["next"] is None:
            break
    return events


async def _note_own_lag(crowd: Crowd) -> None:
    while True:
        due = time.perf_counter() + 0.01
        await asyncio.sleep(0.01)
        crowd.note("own lag", time.perf_counter() - due)


def pin(pid: int, cpus: set[int]) -> None:
    """Pin all threads of a process, and those that they start, to these CPUs."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cpus)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control_plane",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="rounds of 6 s")
    parser.add_argument("--json", action="store_true", help="print one JSON line after the table")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--round-s", type=float, help="inner steps of the slowest worker; default 30")
    parser.add_argument("--viewers", type=int, default=0, help="viewers of the dashboard")
    parser.add_argument("--postgresql", action="store_true", help="instead of SQLite and a directory")
    arguments = parser.parse_args()
    measured = partial(_measured, in_postgresql if arguments.postgresql else coordinator_process)
    round_s = arguments.round_s or (6.0 if arguments.quick else 30.0)

    plain = measured(arguments.workers, round_s)
    _print(plain)
    figures = dict(plain)
    for name, pages in (("streams", False), ("pages", True)) if arguments.viewers else ():
        figures[name] = viewed = measured(arguments.workers, round_s, arguments.viewers, pages)
        _print(viewed)
        p99, before = (each["kinds"]["heartbeat"]["p99_ms"] for each in (viewed, plain))
        viewed["heartbeat_p99_ratio"] = round(p99 / before, 2)
        print(f"p99 of heartbeats with {arguments.viewers} {name}: {viewed['heartbeat_p99_ratio']} times as long")
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        print(json.dumps({"benchmark": "control_plane", **machine, **figures}))


@contextmanager
def in_postgresql() -> Iterator[InProcess]:
    with cluster(1, lines=False) as made:
        yield made.only()


def _measured(
    coordinator: Callable[[], AbstractContextManager[InProcess]],
    workers: int,
    round_s: float,
    viewers: int = 0,
    pages: bool = False,
) -> dict[str, Any]:
    first, *others = sorted(os.sched_getaffinity(0))
    pin(os.getpid(), set(others) or {first})  # and all that it starts, but for the coordinator
    with coordinator() as running:
        pin(running.pid, {first})
        report = asyncio.run(measure(running, workers, round_s, viewers, pages))
        report["peak_rss_mb"] = round(running.memory("VmHWM") / 1e6, 1)
        report["cpu_s"] = round(running.cpu_seconds(), 1)
    return report


def _viewed(report: dict[str, Any]) -> str:
    return f"{report['viewers']} {'dashboards' if report['dashboards'] else 'streams'}, " if report["viewers"] else ""


def _print(report: dict[str, Any]) -> None:
    table = Table(
        *("milliseconds", "count", "p50", "p99", "most"),
        title=f"{report['workers']} workers, {_viewed(report)}{report['seconds']} s, one core",
    )
    for kind, r in report["kinds"].items():
        table.add_row(kind, f"{r['count']:,}", f"{r['p50_ms']:.1f}", f"{r['p99_ms']:.1f}", f"{r['max_ms']:.1f}")
    console = Console(width=100)
    console.print(table)
    console.print(
        f"{report['missed_leases']} leases missed; peak RSS {report['peak_rss_mb']} MB; all joined in "
        f"{report['join_s']} s; {report['cpu_s']} s of CPU; {report['viewers_requests']} requests of viewers",
        highlight=False,
    )


if __name__ == "__main__":
    main()
