"""kill -9 at every point: before and after each fsync, rename, link, removal and commit of the coordinator, in turn, and
at every step of a worker's sync. Each time the run ends as if nothing had happened.

The coordinator's points are found, not listed by hand alone: what an undisturbed run passes must be exactly `POINTS`.
"""

import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import torch

from harness.coordinator import InThread, coordinator_thread
from harness.member import Member, spec_toml
from harness.ports import free_port
from protocol.digest import model_digest
from protocol.messages import Action, LeaveRequest
from protocol.spec.run import parse_spec
from tests.coordinator.crew import play_round
from tests.support import crash_points
from tests.support.cases import in_the_night
from tests.support.crash_points import forked
from tests.support.crashing import run_coordinator, run_worker
from tests.support.reference import fragment_bounds, run_reference
from tests.support.specs import tiny_spec
from tests.support.text import write_text
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.system

ROUNDS = 2
CHECKPOINTS = "every_rounds = 1\nkeep = 1"

PARTS = 8
# Before a merge every fourth point, whose neighbours do much the same; all of them in the night.
NIGHTLY = [in_the_night(part) if part % 4 else part for part in range(PARTS)]

# What at least must be among the points, so that none gets lost by a change of how they are found.
FILES = {
    "fsync incoming/N",
    "link contributions/N/N.W",
    "fsync contributions/N",
    "link deltas/N/N.D",
    "fsync deltas/N",
    "write state/N.N",
    "link checkpoints/N/N.D",
    "fsync checkpoints/N",
    "remove contributions/N/N.W",
    "remove contributions/N",
}
COMMITS = {"service", "membership", "assigning", "opening", "closing", "contributing", "publishing"}
COMMITS |= {"outer_state", "checkpointing", "retention"}


class Victim:
    """A coordinator that is started again, with the same command, whenever it has killed itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.deaths = 0
        self.port = free_port()
        folder.mkdir(exist_ok=True)

    def start(self) -> None:
        """Return when it serves, or has died."""
        out = self.folder / "out"
        out.unlink(missing_ok=True)
        self.process = forked(run_coordinator, self.folder, self.folder / "data", self.port)
        wait_until(lambda: (out.exists() and "ready at" in out.read_text()) or not self.process.is_alive())
        if self.process.is_alive():
            self.url = out.read_text().splitlines()[0].split()[-1]
            self.port = int(self.url.rsplit(":", 1)[1])

    def revive(self) -> None:
        """Nobody answers: it must be dead, by SIGKILL; start it again."""
        self.process.join(PATIENCE_S)
        assert self.process.exitcode == -signal.SIGKILL, (self.folder / "log").read_text()
        self.deaths += 1
        self.start()

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()

    @property
    def token(self) -> str:
        return (self.folder / "data" / "admin.token").read_text().strip()

    def client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE_S, transport=Enduring(self))


class Enduring(httpx.BaseTransport):
    """Repeats a request whose answer was lost, as a worker's client does, once the coordinator is back."""

    def __init__(self, victim: Victim) -> None:
        self._victim = victim
        self._inner = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        while True:
            try:
                response = self._inner.handle_request(request)
                response.read()
                return response
            except httpx.TransportError:
                self._victim.revive()

    def close(self) -> None:
        self._inner.close()


def prepare(member: Member) -> None:
    """Do what the coordinator says until the member holds state 0."""
    state_round = None
    while True:
        assignment = member.assignment(state_round)
        match assignment.action:
            case Action.SEED:
                replies = [member.seed_fragment(p, 0.5) for p in range(len(member.theta))]
                if all(reply.is_success for reply in replies):
                    state_round = 0
                else:  # the coordinator forgot whom it had asked to: it is asked again
                    assert {reply.status_code for reply in replies if not reply.is_success} == {409}
            case Action.RECOVER:
                assert assignment.round == 0
                for theta in member.theta:
                    theta[:] = 0.5
                state_round = 0
            case _:
                assert state_round == 0, assignment
                return


def play(victim: Victim, run: str) -> str:
    """A whole run of two members; the digest that it ends with. Checks what holds of every run on the way."""
    with victim.client() as operator, victim.client() as of_a, victim.client() as of_b:
        spec = spec_toml(run, rounds=ROUNDS, min_workers=2, members="lease_s = 3600", checkpoints=CHECKPOINTS)
        operator.post("/v1/runs", content=spec.encode()).raise_for_status()
        members = [Member(of_a, run, "a"), Member(of_b, run, "b")]
        for member in members:
            member.join(victim.token, member_token=f"ost_{member.name * 43}")
        for member in members:
            prepare(member)
        for round_ in range(ROUNDS):
            play_round(members, round_)
        digests = {model_digest(member.base(p) for p in range(len(member.theta))).hex() for member in members}
        assert len(digests) == 1
        for member in members:
            told = LeaveRequest(state_round=ROUNDS, state_digest=next(iter(digests)))
            left = member.http.request("DELETE", member.path(), json=told.model_dump(mode="json"))
            assert left.is_success or left.status_code == 401, left.text  # 401: the lease had ended before the answer
    (digest,) = digests
    assert final_digest(victim, run) == digest
    return digest


def final_digest(victim: Victim, run: str) -> str:
    """The digest of the run's last checkpoint, once it is there. Checks what the run has recorded, too."""
    with victim.client() as operator:

        def there() -> bool:
            return operator.get(f"/v1/runs/{run}/checkpoints/{ROUNDS}").is_success

        wait_until(there)
        final = operator.get(f"/v1/runs/{run}/checkpoints/{ROUNDS}").json()
        for round_ in range(ROUNDS):
            fragments = operator.get(f"/v1/runs/{run}/rounds/{round_}").raise_for_status().json()["fragments"]
            assert all(fragment["contributors"] == ["a", "b"] for fragment in fragments)
        assert units(victim, run) == [(0, ROUNDS * 2 * 5)]
        return str(final["state_digest"])


def await_kill(victim: Victim, point: str, deaths: int) -> None:
    """Wait until the coordinator has died at `point`. That may be after the end of the run, because it still cleans up
    then. `deaths`: how often it had died before."""
    wait_until(lambda: f"killed {point}" in crash_points.trace(victim.folder))
    if victim.deaths == deaths:
        victim.revive()


def cleaned(victim: Victim, since: int) -> bool:
    """True once the folder of every round's contributions is removed, the last thing that a run does: it passes these
    points while nobody waits for it. `since`: the points before the run."""
    removed = crash_points.trace(victim.folder)[since:].count("after remove contributions/N in retention.clean")
    return removed == ROUNDS


def units(victim: Victim, run: str) -> list[tuple[int, int]]:
    """The units that were consumed, as maximal ranges; AssertionError where one was consumed twice or not at all."""
    with sqlite3.connect(victim.folder / "data" / "outerstep.db") as database:
        rows = database.execute(
            "SELECT start, stop, unit_ranges.state FROM unit_ranges JOIN runs ON runs.id = run_id WHERE name = ? ORDER BY start",
            [run],
        ).fetchall()
    merged: list[tuple[int, int]] = []
    for start, stop, state in rows:
        assert state == "consumed", (start, stop, state)
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


class Undisturbed(NamedTuple):
    """How a run ends, and how often it passes each point; the coordinator is there for further runs."""

    victim: Victim
    digest: str
    passed: Counter[str]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Undisturbed]:
    victim = Victim(tmp_path_factory.mktemp("crash") / "coordinator")
    victim.start()
    try:
        start = len(crash_points.trace(victim.folder))
        digest = play(victim, "undisturbed")
        wait_until(lambda: cleaned(victim, start))
        yield Undisturbed(victim, digest, Counter(crash_points.trace(victim.folder)[start:]))
    finally:
        victim.stop()


def test_every_operation_that_matters_is_a_point(undisturbed: Undisturbed) -> None:
    operations = [point.partition(" ")[2].partition(" in ")[::2] for point in undisturbed.passed]
    assert {what for what, _ in operations} >= FILES
    assert {who.partition(".")[0] for what, who in operations if what.startswith("commit of ")} >= COMMITS


@pytest.mark.covers("reliability:acknowledged-once")
@pytest.mark.parametrize("part", NIGHTLY)
def test_a_coordinator_killed_at_each_point_ends_as_the_undisturbed_one(undisturbed: Undisturbed, part: int) -> None:
    victim = undisturbed.victim
    for index, point in enumerate(sorted(undisturbed.passed)[part::PARTS]):
        run, deaths = f"part-{part}-{index}", victim.deaths
        crash_points.arm(victim.folder, point, (undisturbed.passed[point] + 1) // 2, run)
        assert play(victim, run) == undisturbed.digest, point
        await_kill(victim, point, deaths)
        assert final_digest(victim, run) == undisturbed.digest, point
        assert victim.deaths == deaths + 1, f"not killed {point}"


def test_a_coordinator_killed_at_each_point_of_its_first_start_starts_again(tmp_path: Path) -> None:
    first = Victim(tmp_path / "first")
    first.start()
    first.stop()
    points = Counter(crash_points.trace(first.folder))
    assert {point.partition(" ")[2] for point in points} >= {"migrations", "commit of audit, tokens in tokens.create"}
    for index, point in enumerate(points):
        victim = Victim(tmp_path / str(index))
        crash_points.arm(victim.folder, point, 1, "start")
        victim.start()
        victim.revive()
        try:
            with victim.client() as operator:  # with the admin token that is in the file now
                assert operator.get("/v1/runs").raise_for_status().json()["items"] == [], point
        finally:
            victim.stop()


# What at least must be among a worker's points; each of the snapshot's files is one fsync, one rename and the fsync of
# the directory.
WORKER_OPERATIONS = {
    "join",
    "seed",
    "assignment",
    "inner step",
    "fsync snapshot.pt.new in snapshot.save",
    "rename to snapshot.pt in snapshot.save",
    "fsync . in snapshot.save",
    "rename to member.json in membership.join",
    "contribute",
    "delta",
    "outer step",
    "report_evaluation",
    "leave",
}
OF_A_COPY = {
    "fsync state-N.pt.new in snapshot.save_state",
    "rename to state-N.pt in snapshot.save_state",
    "fsync . in snapshot.save_state",
}
OF_FILES = {"write of the outer state", "fsync state-N-of-N.bin in mapped.sync"}


def worker_spec(name: str, text: Path, rounds: int) -> str:
    members = "lease_s = 3600\n[evaluation]\nmax_tokens = 64"
    return tiny_spec(name, text, seed=5, rounds=rounds, min_workers=2, members=members)


def begin(
    served: InThread, folder: Path, run: str, point: str | None = None, count: int = 1, *, in_files: bool = False
) -> ForkServerProcess:
    """Start the worker whose state is in `folder`, to die when it passes `point` for the `count`-th time."""
    folder.mkdir(exist_ok=True)
    if point is not None:
        crash_points.arm(folder, point, count, point)
    return forked(run_worker, folder, served.url, run, served.admin_token, in_files=in_files)


def end(process: ForkServerProcess, folder: Path, exit_code: int) -> None:
    process.join(PATIENCE_S)
    assert process.exitcode == exit_code, (folder / "log").read_text()


@pytest.mark.covers("reliability:worker-restart")
@pytest.mark.parametrize("in_files", [False, in_the_night(True)], ids=["in memory", "in files"])
def test_a_worker_killed_at_each_point_in_turn_ends_as_the_undisturbed_one(tmp_path: Path, *, in_files: bool) -> None:
    torch.set_num_threads(1)
    text = write_text(tmp_path / "text", seed=2)
    a, b = tmp_path / "a", tmp_path / "b"
    with coordinator_thread(tmp_path / "data") as served:
        served.create_run(worker_spec("undisturbed", text, rounds=2))
        both = [(begin(served, folder, "undisturbed", in_files=in_files), folder) for folder in (a, b)]
        for process, folder in both:
            end(process, folder, 0)
        passed = crash_points.trace(a) + crash_points.trace(b)  # either may have seeded
        assert {point.partition(" ")[2] for point in passed} >= WORKER_OPERATIONS | (
            OF_FILES if in_files else OF_A_COPY
        )
        # State 0 is seeded once, so that comes first; leaving comes last, and each worker does that once.
        points = sorted(set(passed) - {"before leave", "after leave"}, key=lambda each: (each[-5:] != " seed", each))

        spec = worker_spec("killed", text, rounds=len(points))
        served.create_run(spec)
        a, b = tmp_path / "killed" / "a", tmp_path / "killed" / "b"
        a.parent.mkdir()
        of_b = None
        for point in points:
            end(begin(served, a, "killed", point, in_files=in_files), a, -signal.SIGKILL)
            if of_b is None and not point.endswith(" seed"):
                of_b = begin(served, b, "killed", "after leave", in_files=in_files)
        assert of_b is not None
        end(begin(served, a, "killed", "before leave", in_files=in_files), a, -signal.SIGKILL)
        end(of_b, b, -signal.SIGKILL)
        deaths = [line for line in crash_points.trace(a) if line.startswith("killed ")]
        assert deaths == [f"killed {point}" for point in [*points, "before leave"]]
        for folder in (a, b):
            end(begin(served, folder, "killed", in_files=in_files), folder, 0)  # nothing to do any more
        with served.client() as client:
            final = client.get(f"/v1/runs/killed/checkpoints/{len(points)}").raise_for_status().json()
    parsed = parse_spec(spec)
    reference = run_reference(parsed, 2)
    bounds = fragment_bounds(len(reference.theta), parsed.sync.fragment_elements)
    assert [fragment["state_digest"] for fragment in final["fragments"]] == reference.digests(bounds)
