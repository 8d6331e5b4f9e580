"""A worker that harms the model is found by real evaluators, and the run ends as it would have without that worker."""

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.coordinator import InThread, coordinator_thread
from harness.member import waiting
from protocol.messages import Scope
from tests.coordinator.crew import events, info
from tests.support.text import write_chapters
from worker.box import set_up
from worker.diloco import DiLoCo
from worker.link.client import Client, open_http
from worker.rounds.in_flight import InFlight
from worker.settings import BoxSettings
from worker.state.work import Contribution
from worker.train import train

SPEC = """
name = "r"
[model]
preset = "tiny"
[data]
source = "{source}"
sequence_length = 32
holdout = 0.1
[inner]
batch_size = 2
learning_rate = 3e-3
warmup_steps = 2
joiner_warmup_steps = 0
[sync]
rounds = 3
inner_steps = 6
fragment_elements = 60_000
aggregation = "mean"
{sync}
[members]
min_workers = 3
[evaluation]
max_tokens = 2048
"""


def backwards(made: Contribution) -> Contribution:
    """Return the way back, eight times as long: the mean then leads back, too."""
    return replace(made, delta=made.delta * -8, norm=made.norm * 8)


def work(running: InThread, name: str, errors: list[BaseException], steps: dict[str, int]) -> None:
    try:
        with open_http(running.url) as http:
            client = Client(http, "r", running.token(Scope.WORKER, note=name))
            run = client.run_detail()
            box = set_up(run.spec, BoxSettings(name=name, device="cpu", threads=1), torch.device("cpu"))
            given: dict[str, Any] = {"data": box.data.summary, "evaluate": box.evaluate, "probe": box.probe}
            joining = DiLoCo(box.model, box.optimizers, client=client, run=run, name=name, **given)
            with closing(box.data), joining:
                train(joining, box)
            taken = (int(each["step"]) for one in box.optimizers for each in one.state.values() if "step" in each)
            steps[name] = max(taken, default=0)
    except Exception as error:  # noqa: BLE001, asserted by the test
        errors.append(error)


@pytest.mark.system
@pytest.mark.covers("security:ascent")
@pytest.mark.usefixtures("one_h")
@pytest.mark.parametrize("sync", ["", 'wait = "never"', "overlap = 1"])
def test_the_run_ends_without_the_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str):
    send = InFlight.send

    def sending(flight: InFlight, p: int, make: Callable[[], Contribution]) -> None:
        harms = threading.current_thread().name == "m"
        send(flight, p, (lambda: backwards(make())) if harms else make)

    monkeypatch.setattr(InFlight, "send", sending)
    text, errors, steps = write_chapters(tmp_path / "text"), list[BaseException](), dict[str, int]()
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC.format(source=text, sync=waiting(sync)))
        workers = [threading.Thread(target=work, args=(running, name, errors, steps), name=name) for name in "abcm"]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert errors == []
        left_out = [event["data"] for event in events(running, "r", "redone")]
        assert [each["workers"] for each in left_out] == [["m"]]
        assert info(running, "r")["state"] == "finished"
        losses = [info(running, "r", f"/rounds/{number}")["held_out_loss"] for number in range(3)]
        assert all(after < before for before, after in pairwise(losses)), losses
        if not sync:
            assert all(steps[name] <= 3 * 6 for name in "abc"), f"moments of the dropped state are left: {steps}"
