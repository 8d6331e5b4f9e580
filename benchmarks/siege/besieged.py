"""A coordinator that may open 1,024 files, with workers that train, and the measurements."""

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from coordinator.store.tokens import new_secret
from harness.coordinator import CoordinatorProcess, InProcess
from protocol.messages import Scope

RUN = "siege"
OPEN_FILES = 1024
BEYOND = 1_000_000  # the run's last round
WORKERS = 2
EXCHANGED = 40
SPEC = """
name = "{run}"
[data]
source = "custom"
[sync]
wait = "always"
rounds = {beyond}
inner_steps = {inner_steps}
fragment_elements = 262144
[members]
min_workers = 1
lease_s = 20
[evaluation]
every_rounds = {beyond}
[retention]
events = 1000000
"""


@dataclass(frozen=True)
class Size:
    """Seconds before, during and after an attack; the rounds of the run's history; the workers' work."""

    before_s: float
    during_s: float
    after_s: float
    past_rounds: int
    inner_steps: int = 4
    step_s: float = 0.05
    elements: int = 200_000


FULL = Size(15.0, 30.0, 15.0, 1000)
QUICK = Size(2.0, 3.0, 2.0, 20)


@dataclass
class Span:
    """The measurements of one span of time. `peak_rss`: of the coordinator, in bytes."""

    rounds_per_s: float
    longest_round_s: float
    peak_rss: int
    lost_leases: int


@dataclass
class Besieged:
    """The coordinator of a row."""

    running: InProcess
    size: Size
    worker_token: str

    def attack(self, name: str, at_once: int) -> dict[str, Any]:
        """Return the measurements before, during and after an attack."""
        before = self._span(self.size.before_s)
        viewer_token, worker_token = self.running.token(Scope.VIEWER), self.running.token(Scope.WORKER)
        command = [sys.executable, "-m", "benchmarks.siege.attacks", name, str(at_once), str(self.size.during_s)]
        command += [str(self.running.port), RUN, worker_token, viewer_token, *self._exchanged()]
        attacker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            during = self._span(self.size.during_s)
            printed, _ = attacker.communicate(timeout=60 + self.size.during_s)
        finally:
            attacker.kill()
            attacker.wait()
        if attacker.returncode != 0:
            raise RuntimeError(f"the attacker ended with {attacker.returncode}")
        after = self._span(self.size.after_s)
        spans = {"before": before, "during": during, "after": after}
        return {"attack": name, "at_once": at_once, **{key: asdict(each) for key, each in spans.items()}} | {
            **json.loads(printed),
            "slower": before.rounds_per_s / max(during.rounds_per_s, 1e-9),
            "larger": during.peak_rss / before.peak_rss,
        }

    def _exchanged(self) -> list[str]:
        """Return worker tokens that were exchanged for one join token."""
        secrets = [new_secret()[0] for _ in range(EXCHANGED)]
        with self.running.client(self.running.token(Scope.JOIN, run=RUN, uses=EXCHANGED)) as http:
            for number, secret in enumerate(secrets):
                reply = http.post(f"/v1/runs/{RUN}/workers/hostile-{number}/token", json={"token": secret})
                reply.raise_for_status()
        return secrets

    def await_training(self, workers: list[subprocess.Popen[bytes]], log: Path) -> None:
        """Wait until all workers have taken part in a round. Raises RuntimeError if one of them exits before."""
        while not any(
            each["kind"] == "round-opened" and len(each["data"]["workers"]) == WORKERS for each in self._events()
        ):
            if any(worker.poll() is not None for worker in workers):
                raise RuntimeError(f"a worker has ended: {log.read_text()[-2000:]}")
            time.sleep(0.2)

    def _span(self, seconds: float) -> Span:
        """Wait; return the rounds published meanwhile and the coordinator's peak memory."""
        Path(f"/proc/{self.running.pid}/clear_refs").write_text("5")  # resets the peak
        began = time.time()
        time.sleep(seconds)
        ended = time.time()
        events = [each for each in self._events() if began <= each["at"] <= ended]
        published = [each["at"] for each in events if each["kind"] == "round-published"]
        times = [began, *published, ended]
        return Span(
            rounds_per_s=len(published) / (ended - began),
            longest_round_s=max(b - a for a, b in pairwise(times)),
            peak_rss=self.running.memory("VmHWM"),
            lost_leases=sum(each["kind"] == "lost" for each in events),
        )

    def _events(self) -> Iterator[dict[str, Any]]:
        after = "0"
        with self.running.client() as admin:
            while after is not None:
                page = admin.get(f"/v1/runs/{RUN}/events?limit=1000&after={after}", timeout=120).raise_for_status()
                yield from page.json()["items"]
                after = page.json()["next"]


@contextmanager
def besieged(size: Size) -> Iterator[Besieged]:
    """A coordinator with a run that has a history, and workers that train."""
    with TemporaryDirectory(prefix="outerstep-") as folder:
        coordinator = CoordinatorProcess(Path(folder) / "data", open_files=OPEN_FILES)
        workers: list[subprocess.Popen[bytes]] = []
        os.environ["OUTERSTEP_COORDINATOR_PROXIES"] = ""  # connections from this machine count per address too
        try:
            running = coordinator.start()
            token = running.token(Scope.WORKER)
            running.create_run(SPEC.format(run=RUN, beyond=BEYOND, inner_steps=size.inner_steps))
            _give_history(running.data_dir, size.past_rounds)
            log = (Path(folder) / "workers.log").open("wb")
            for number in range(WORKERS):
                command = [sys.executable, "-m", "benchmarks.siege.worker", running.url, RUN, f"worker-{number}", token]
                command += [str(Path(folder) / f"state-{number}"), str(size.elements), str(size.step_s)]
                workers.append(subprocess.Popen(command, stdout=log, stderr=log))
            made = Besieged(running, size, token)
            made.await_training(workers, Path(log.name))
            yield made
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
            coordinator.stop()
            del os.environ["OUTERSTEP_COORDINATOR_PROXIES"]


def _give_history(data_dir: Path, rounds: int) -> None:
    """Write rows of this many finished rounds and their evaluations, as a long run has them. Their numbers are beyond
    what the run will reach, so they appear only in listings."""
    account = json.dumps({"upload_bytes": 1, "download_bytes": 1, "seconds": {"train": 1.0, "sync": 1.0}})
    with closing(sqlite3.connect(data_dir / "outerstep.db", timeout=60)) as database, database:
        ((run_id,),) = database.execute("SELECT id FROM runs")
        numbers = range(BEYOND, BEYOND + rounds)
        database.executemany(
            "INSERT INTO rounds "
            "(run_id, round, step, opened_at, closed_at, tokens, loss, upload_bytes, delta_bytes, account) "
            "VALUES (?, ?, 0, 1, 2, 3, 4, 5, 6, ?)",
            [(run_id, number, account) for number in numbers],
        )
        database.executemany(
            "INSERT INTO evaluations (run_id, round, worker, loss, tokens) VALUES (?, ?, '', 1, 1)",
            [(run_id, number) for number in numbers],
        )
