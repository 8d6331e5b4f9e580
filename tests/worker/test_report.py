"""What a worker tells of its machine is its owner's choice."""

import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from harness.coordinator import coordinator_thread
from outerstep.common.exit_codes import Exit
from protocol.messages import HostDetail, Metrics, WorkerInfo
from tests.support.specs import tiny_spec
from tests.support.text import write_chapters
from tests.support.workers import worker_settings
from worker.accounts.machine import SOME, host_facts, shared_facts, shared_metrics
from worker.agent import run_worker
from worker.settings import WorkerSettings

ALL = {"host", "device", "threads", "kernels", "torch", "python", "precision"}


@pytest.mark.covers("security:training-data-leak")
def test_what_is_told() -> None:
    facts = host_facts(torch.device("cpu")) | {"precision": "fp32"}
    assert facts.keys() == ALL
    assert shared_facts(facts, "all") == facts
    assert shared_facts(facts, "some").keys() == {"kernels", "torch", "python", "precision"}
    assert shared_facts({"processes": 2}, "some") == {"processes": 2}
    assert shared_facts(facts, "nothing") == {}
    assert not {"host", "device"} & SOME


def test_measurements_that_give_the_device_away_are_told_with_all_alone() -> None:
    metrics = Metrics(loss=1.0, mfu=0.4, peak_memory_bytes=7, inner_steps_per_second=2.0)
    assert shared_metrics(metrics, "all") == metrics
    for report in ("some", "nothing"):
        told = shared_metrics(metrics, report)
        assert told == Metrics(loss=1.0, inner_steps_per_second=2.0)


def worker(**given: Any) -> WorkerSettings:
    return WorkerSettings(**{"url": "http://c", "run": "r", "token": "t", **given})


def test_the_machines_name_is_not_told_by_the_workers() -> None:
    assert worker().report == "all"
    with pytest.raises(ValidationError, match="report = 'some' .*give a name"):
        worker(report="some")
    assert worker(report="nothing", name="volunteer").name == "volunteer"


@pytest.mark.slow
@pytest.mark.parametrize("report", ["all", "some", "nothing"])
def test_what_a_coordinator_knows(report: HostDetail, tmp_path: Path) -> None:
    text = write_chapters(tmp_path / "text")
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(tiny_spec("r", text, seed=1, rounds=1, min_workers=1))
        assert run_worker(worker_settings(running, "r", tmp_path / "state", report=report)) == Exit.DONE
        with running.client() as http:
            shown = WorkerInfo.model_validate(http.get("/v1/runs/r/workers/a").json())
    assert shown.host.keys() == {"all": ALL, "some": ALL & SOME, "nothing": set()}[report]
    assert shown.metrics.loss is not None
    assert (shown.metrics.peak_memory_bytes is None) is (report != "all")
    if report != "all":
        assert platform.node() not in shown.model_dump_json()
