"""Private data with real workers: each trains on the text of its own machine, and tells no more of it than its length."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import Tensor
from typer.testing import CliRunner

from harness.coordinator import coordinator_thread
from outerstep.cli import app
from outerstep.common.exit_codes import Exit
from tests.support.specs import tiny_spec
from tests.support.text import write_chapters
from tests.support.waiting import wait_until
from tests.support.workers import worker_settings
from worker.agent import run_worker
from worker.data.open_training_set import TextData

pytestmark = pytest.mark.slow


def test_two_workers_with_different_text_make_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: dict[int, list[int]] = {}  # by the length of the set: those that were asked for
    sent: list[bytes] = []
    unit, send = TextData.unit, httpx.Client.send

    def noted(self: TextData, number: int) -> Tensor:
        numbers.setdefault(self.units_per_epoch, []).append(number)
        return unit(self, number)

    def sending(self: httpx.Client, request: httpx.Request, **rest: Any) -> httpx.Response:
        with suppress(httpx.RequestNotRead):  # of a contribution, which is sent in pieces
            sent.append(request.content)
        return send(self, request, **rest)

    monkeypatch.setattr(TextData, "unit", noted)
    monkeypatch.setattr(httpx.Client, "send", sending)
    sets = {
        "a": write_chapters(tmp_path / "a", chapters=6, repeats=20),
        "b": write_chapters(tmp_path / "b", words="the quick brown fox", chapters=4, repeats=20),
    }
    spec = tiny_spec("shared", tmp_path / "nowhere", seed=1, rounds=3, min_workers=2)
    with coordinator_thread(tmp_path / "coordinator") as running, running.client() as http:
        running.create_run(spec.replace("[data]", "[data]\nprivate = true"))

        def work(name: str) -> Exit:
            state = tmp_path / f"{name}-state"
            return run_worker(worker_settings(running, "shared", state, name=name, data=str(sets[name])))

        with ThreadPoolExecutor() as threads:
            assert list(threads.map(work, sets)) == [Exit.DONE, Exit.DONE]
        wait_until(lambda: http.get("/v1/runs/shared").json()["state_digest"] is not None)
        run = http.get("/v1/runs/shared").json()
        workers = http.get("/v1/runs/shared/workers").json()["items"]
        epochs = http.get("/v1/runs/shared/units").json()["items"]
        first = http.get("/v1/runs/shared/rounds/0").json()
        arguments = ["--url", running.url, "--token", running.admin_token]
        table, facts = (
            CliRunner().invoke(app, ["run", "show", "shared", *what, *arguments]) for what in (["--units"], [])
        )
    assert {worker["state_digest"] for worker in workers} == {run["state_digest"]}
    assert run["divergences"] == 0
    assert {(each["worker"], each["units"]) for each in epochs} == {
        (name, units) for name, units in zip("ab", sorted(numbers, reverse=True), strict=True)
    }
    assert [sorted(asked) for asked in numbers.values()] == [list(range(15)), list(range(15))], "3 rounds of 5"
    assert set(first["evaluations"]) == {"a", "b"}
    losses = [each["loss"] for each in first["evaluations"].values()]
    assert min(losses) < first["held_out_loss"] < max(losses)
    assert [line.split()[:2] for line in table.stdout.splitlines()[:2]] == [
        ["worker", "epoch"],
        [epochs[0]["worker"], str(epochs[0]["epoch"])],
    ]
    assert "private: each worker's own" in facts.stdout
    assert re.search(r"held-out loss +\d\.\d{4} \(\d\.\d{4} bits/byte\)", facts.stdout)
    joins = [json.loads(body)["data"] for body in sent if b'"tensors"' in body]
    assert [sorted(join) for join in joins] == [["units"], ["units"]]
