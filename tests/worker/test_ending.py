"""How the end of a run reaches its workers: told by the heartbeat, they train no further, and have its last state."""

import threading
from pathlib import Path

import pytest

from tests.support.waiting import PATIENCE_S, wait_until
from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread
from worker.diloco import DiLoCo
from worker.link.client import Client
from worker.link.membership import Heartbeat

pytestmark = pytest.mark.slow


def test_a_stopped_run_ends_its_workers(tmp_path: Path) -> None:
    """The heartbeat brings the news in the middle of a round."""

    def stop(diloco: DiLoCo) -> None:
        if (diloco.round, diloco.inner_step) == (1, 1):
            with coordinator.client() as http:
                http.patch("/v1/runs/toy", json={"state": "stopped"}).raise_for_status()
            diloco.joined.heartbeat.beat()

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(), tmp_path)
        diloco = run.worker("a", on_step=stop)
        assert diloco.finished
        assert diloco.inner_step == 0


def test_a_stopped_run_ends_a_worker_that_waits_for_a_delta(tmp_path: Path) -> None:
    """It was told `run-ended` by the delta that it asked for, and died of it where no heartbeat had come before."""
    contributed, stopped = threading.Event(), threading.Event()

    class Contributes(Client):
        def delta(self, round_number, p, limit_bytes, member_token=None, *, early=bool, **options):
            wait_until(lambda: not early())  # it has contributed
            contributed.set()
            return super().delta(round_number, p, limit_bytes, member_token, early=early, **options)

    def stop(diloco: DiLoCo) -> None:
        assert contributed.wait(PATIENCE_S)
        if not stopped.is_set():
            with coordinator.client() as http:
                http.patch("/v1/runs/toy", json={"state": "stopped"}).raise_for_status()
            stopped.set()

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(min_workers=2), tmp_path)
        done = run.workers(["a", "b"], a={"client_class": Contributes}, b={"on_step": stop})
        assert all(diloco.finished for diloco in done.values())
        assert run.told("a").state == "left"


@pytest.mark.usefixtures("one_h")
@pytest.mark.parametrize("sync", ["", 'wait = "never"'])
def test_a_worker_that_the_run_finished_without_trains_no_further_and_takes_its_last_state(
    tmp_path: Path, sync: str
) -> None:
    """The lease said `continue`, so it went on with a round whose work nobody took any more, for as long as that takes
    it."""
    steps: list[int] = []
    begun = threading.Event()

    def wait(diloco: DiLoCo) -> None:
        assert diloco.round == 0 or begun.wait(PATIENCE_S)

    def slow(diloco: DiLoCo) -> None:
        if diloco.round == 1:
            steps.append(diloco.inner_step)
            begun.set()
            wait_until(lambda: run.info().state == "finished")
            diloco.joined.heartbeat.beat()

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        members = "grace_factor = 0\ngrace_min_s = 0"
        run = Toy(coordinator, toy.spec(rounds=2, min_workers=2, members=members, sync=sync), tmp_path)
        done = run.workers(["a", "b", "c"], a={"on_step": wait}, b={"on_step": wait}, c={"on_step": slow})
        assert steps == [0], "it was told before the first inner step of the round, and looked after that"
        assert done["c"].finished
        digests = {run.told(name).state_digest for name in ("a", "b", "c")}
        assert digests == {run.final().state_digest}


def test_a_worker_that_is_told_of_the_end_takes_its_last_outer_step(tmp_path: Path) -> None:
    """The news comes before the deltas of the last round have."""

    class Told(Client):
        def delta(self, round_number, p, limit_bytes, member_token=None, *, early=bool, **options):
            wait_until(lambda: not early())  # it has contributed
            if round_number == 1:
                wait_until(lambda: run.info().state == "finished")
                heartbeats[0].beat()
                assert heartbeats[0].run_ended.is_set()
            return super().delta(round_number, p, limit_bytes, member_token, early=early, **options)

    heartbeats: list[Heartbeat] = []

    def note(diloco: DiLoCo) -> None:
        heartbeats.append(diloco.joined.heartbeat)

    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(rounds=2), tmp_path)
        diloco = run.worker("a", client_class=Told, on_step=note)
        assert diloco.joined.state.round == 2
        assert run.told("a").state_digest == run.final().state_digest
        with coordinator.client() as http:
            kinds = [event["kind"] for event in http.get("/v1/runs/toy/events?limit=1000").json()["items"]]
        assert "diverged" not in kinds
