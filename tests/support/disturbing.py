"""A run of three real workers that a test disturbs in the middle of a round. It must end as if nothing had happened."""

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import torch

from harness.coordinator import Running
from protocol.messages import Scope
from protocol.spec.run import parse_spec
from tests.support.reference import fragment_bounds, run_reference
from tests.support.specs import tiny_spec
from tests.support.text import write_text
from tests.support.waiting import wait_until
from tests.support.workers import ForkedWorker

NAMES = ["w0", "w1", "w2"]
UNIT_TOKENS = 4 * 32  # of tiny_spec
INT8 = 'upload_codec = "int8"\ndownload_codec = "int8"'
ERROR_FEEDBACK = 'upload_codec = "ternary"\ndownload_codec = "2bit"'


class Service(Protocol):
    """One coordinator or several."""

    def start(self) -> Running: ...

    def stop(self) -> None: ...


Coordinators = TypeVar("Coordinators", bound=Service)


def get(running: Running, path: str) -> Any:
    with running.client() as client:
        return client.get(path).raise_for_status().json()


def hold_back(running: Running, worker: ForkedWorker, from_round: int) -> int:
    """Freeze `worker` in a round that all others have contributed to and it has not; the round's number.

    Wherever in its round the worker is when the signal hits: the round that is then, or next, held up is the one.
    """
    wait_until(lambda: get(running, "/v1/runs/killed")["round"] >= from_round)
    assert worker.process is not None
    os.kill(worker.process.pid, signal.SIGSTOP)
    others = sorted(set(NAMES) - {worker.name})

    def held_up() -> bool:
        try:
            current = get(running, "/v1/runs/killed/rounds/current")
        except httpx.HTTPStatusError:
            return False  # between two rounds
        # Fragments that the frozen worker had sent are published; those that it had not wait for it alone.
        waiting = [each for each in current["fragments"] if each["state"] == "collecting"]
        return bool(waiting) and all(each["contributors"] == others for each in waiting)

    wait_until(held_up)
    return int(get(running, "/v1/runs/killed")["round"])


def start_workers(running: Running, spec: str, folder: Path) -> list[ForkedWorker]:
    """Create the run "killed", and start a worker for each of NAMES, with its state and log in `folder`."""
    running.create_run(spec)
    token = running.token(Scope.WORKER)
    workers = [ForkedWorker(running.url, "killed", name, token, folder / name) for name in NAMES]
    for worker in workers:
        worker.start()
    return workers


def go_on(worker: ForkedWorker) -> None:
    """Let a worker go on that was held back."""
    assert worker.process is not None
    os.kill(worker.process.pid, signal.SIGCONT)


@dataclass
class Ended:
    """What the coordinator says of a run that has ended: of itself, its last checkpoint, its workers, how many units were
    consumed, and the kinds of its events."""

    run: dict[str, Any]
    final: dict[str, Any]
    workers: list[dict[str, Any]]
    consumed: int
    events: list[str]

    def check_replicas(self) -> None:
        """All hold the coordinator's last state, and each consumed unit is counted once."""
        assert [worker["state_digest"] for worker in self.workers] == [self.final["state_digest"]] * len(NAMES)
        assert self.run["tokens"] == self.consumed * UNIT_TOKENS


def train_through(
    folder: Path, spec: str, coordinators: Sequence[Service], disturb: Callable[[Running, list[ForkedWorker]], Running]
) -> Ended:
    """Start the first of `coordinators` and the workers, and disturb them. The run must come to its end on the
    coordinator that `disturb` returns."""
    torch.set_num_threads(1)
    running = coordinators[0].start()
    workers: list[ForkedWorker] = []
    try:
        workers = start_workers(running, spec, folder)
        running = disturb(running, workers)
        for worker in workers:
            assert worker.wait() == 0, worker.log.read_text()
        run = get(running, "/v1/runs/killed")
        return Ended(
            run,
            get(running, f"/v1/runs/killed/checkpoints/{run['rounds']}"),
            get(running, "/v1/runs/killed/workers")["items"],
            sum(epoch["consumed"] for epoch in get(running, "/v1/runs/killed/units")["items"]),
            [event["kind"] for event in get(running, "/v1/runs/killed/events?limit=1000")["items"]],
        )
    finally:
        for worker in workers:
            if worker.process is not None and worker.process.poll() is None:
                worker.kill()
        for coordinator in coordinators:
            coordinator.stop()


def train_disturbed(
    tmp_path: Path,
    coordinator: Coordinators,
    disturb: Callable[[Coordinators, ForkedWorker], None],
    codecs: str,
) -> None:
    """Train 8 rounds, and disturb them in the middle of one. Every state must be that of the reference."""
    text = write_text(tmp_path / "text", seed=2)
    spec = tiny_spec("killed", text, seed=3, rounds=8, min_workers=3, sync=codecs, members="lease_s = 3600")

    def in_a_round(running: Running, workers: list[ForkedWorker]) -> Running:
        held = hold_back(running, workers[1], from_round=1)
        before = get(running, f"/v1/runs/killed/rounds/{held}")["fragments"]
        disturb(coordinator, workers[1])
        hold = get(running, f"/v1/runs/killed/rounds/{held}")["fragments"]
        for earlier, later in zip(before, hold, strict=True):  # what was acknowledged is still there
            assert set(earlier["contributors"]) <= set(later["contributors"])
        return running

    ended = train_through(tmp_path, spec, [coordinator], in_a_round)
    ended.check_replicas()
    parsed = parse_spec(spec)
    reference = run_reference(parsed, len(NAMES))
    bounds = fragment_bounds(len(reference.theta), parsed.sync.fragment_elements)
    assert [fragment["state_digest"] for fragment in ended.final["fragments"]] == reference.digests(bounds)
