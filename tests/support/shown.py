"""What a coordinator shows of a run and of its workers, as messages."""

from harness.coordinator import Running
from protocol.messages import RunDetail, WorkerInfo
from tests.support.waiting import wait_until


def finished(running: Running, run: str) -> RunDetail:
    """The run once it has ended and the coordinator has taken the last outer step itself."""
    with running.client() as http:
        wait_until(lambda: http.get(f"/v1/runs/{run}").json()["state_digest"] is not None)
        return RunDetail.model_validate(http.get(f"/v1/runs/{run}").json())


def workers_of(running: Running, run: str) -> list[WorkerInfo]:
    """Its workers, by name."""
    with running.client() as http:
        return [WorkerInfo.model_validate(each) for each in http.get(f"/v1/runs/{run}/workers").json()["items"]]
