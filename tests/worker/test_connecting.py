"""A script that says no more than which run it joins."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.waiting import PATIENCE_S, wait_until
from tests.worker import toy
from tests.worker.toy import Toy, coordinator_thread
from worker.settings import script_settings

SCRIPT = """
import torch
from outerstep import DiLoCo
from tests.worker import toy

model = toy.make_model()
first, *rest = model.parameters()  # of which it warns
optimizer = torch.optim.AdamW(rest, lr=0.01)
with DiLoCo.connect(model, optimizer, run="toy") as diloco:
    for unit in diloco.units():
        toy.step(diloco, model, optimizer, unit)
assert diloco.stopped
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTERSTEP_URL", "https://coordinator.example.org/")
    monkeypatch.setenv("OUTERSTEP_TOKEN", " secret\n")


@pytest.mark.usefixtures("environment")
def test_what_is_left_out_is_the_environment_s(monkeypatch: pytest.MonkeyPatch) -> None:
    who = script_settings(run="toy", name=None)
    assert (who.url, who.token) == ("https://coordinator.example.org", "secret")
    assert who.directory == Path.home() / ".local/state/outerstep/toy" / who.name
    given = script_settings(run="toy", url="http://other", token="own", name="box-1")
    assert (given.url, given.token, given.name) == ("http://other", "own", "box-1")
    monkeypatch.setenv("OUTERSTEP_REPORT", "nothing")
    monkeypatch.setenv("OUTERSTEP_NAME", "volunteer")
    who = script_settings(run="toy")
    assert (who.report, who.name) == ("nothing", "volunteer")
    monkeypatch.setenv("OUTERSTEP_MAXUP", "8mbit")
    with pytest.raises(ValueError, match="OUTERSTEP_MAXUP, which is no setting: did you mean OUTERSTEP_MAX_UP"):
        script_settings(run="toy")


@pytest.mark.slow
def test_the_line_is_held_to_what_is_given(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path) as coordinator:
        run, model = Toy(coordinator, toy.spec(), tmp_path), toy.make_model()
        diloco = run.connect(model, torch.optim.SGD(model.parameters()), max_up="8mbit")
        line = diloco.client.line
        assert line.up.limit.delay_s(1_000_000_000) == 0
        assert 1000 - PATIENCE_S < line.up.limit.delay_s(1) <= 1000  # for what went before
        assert line.down.limit.delay_s(1_000_000_000) == line.down.limit.delay_s(1) == 0
        with pytest.raises(ValueError, match=re.escape("max_down = '8': '8' is not a rate in bits per second")):
            run.connect(model, torch.optim.SGD(model.parameters()), max_down="8")
    who = script_settings(run="toy", url="http://c", token="t", max_up="8mbit", max_down=None)
    assert who.rates(2) == (4e6, None)  # of each of two processes


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"url": "coordinator.example.org"}, "url = 'coordinator.example.org': 'coordinator.example.org' is not an address"),
        ({"name": "Box 1"}, "name = 'Box 1': a name has at most 63"),
        ({"run": "My Run"}, "run = 'My Run': a name has at most 63"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("environment")
def test_what_is_wrong_is_said(given: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        script_settings(**{"run": "toy", **given})


def test_what_is_missing_is_said() -> None:
    missing = "url is missing: give url=…, or set OUTERSTEP_URL in the environment; token is missing"
    with pytest.raises(ValueError, match=missing):
        script_settings(run="toy")


@contextmanager
def script(run: Toy, home: Path) -> Iterator["subprocess.Popen[str]"]:
    environment = {"OUTERSTEP_URL": run.coordinator.url, "OUTERSTEP_TOKEN": run.token, "HOME": str(home)}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env=os.environ | environment, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.nightly
def test_a_script_that_is_killed_and_stopped_says_what_it_waits_for_and_leaves(tmp_path: Path) -> None:
    """The second process is let in at once, by what the first has left in the state directory."""
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        run = Toy(coordinator, toy.spec(min_workers=2), tmp_path)
        with script(run, tmp_path) as first:
            assert first.stderr is not None
            lines = []
            for line in first.stderr:
                lines.append(line)
                if "waiting" in line:
                    break
            assert "1 of at least 2 are ready" in lines[-1]
            assert all(re.match(r"\d{4}-\d\d-\d\d \S+ (INFO|WARNING) ", line) for line in lines), lines
            assert any("WARNING" in line for line in lines)
            first.send_signal(signal.SIGKILL)
            first.wait()
        (state,) = (tmp_path / ".local/state/outerstep/toy").iterdir()
        with script(run, tmp_path) as second:
            assert second.stderr is not None
            assert any("waiting" in line for line in second.stderr)
            second.send_signal(signal.SIGTERM)
            _, rest = second.communicate()
            assert second.returncode == 0, rest
        wait_until(lambda: run.told(state.name).state == "left")
