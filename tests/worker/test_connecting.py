"""Scripts: one that says no more than which run it joins, and one that trains on the run's own data, beside
`outerstep worker`."""

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
from torch.optim import Optimizer

from harness.coordinator import InThread
from outerstep.common.exit_codes import Exit
from protocol.errors import Problem
from protocol.messages import RunState, Scope
from protocol.spec.run import RunSpec
from tests.support.text import write_chapters
from tests.support.waiting import PATIENCE_S, wait_until
from tests.worker import toy
from tests.worker.runs import create, join, shown, work
from tests.worker.toy import MakeToy, Toy, at_once
from worker.diloco import DiLoCo
from worker.errors import NotAllowed
from worker.models.building import build_model, logits_of
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
def test_the_line_is_held_to_what_is_given(toy_run: MakeToy) -> None:
    run, model = toy_run(), toy.make_model()
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
def test_a_script_that_is_killed_and_stopped_says_what_it_waits_for_and_leaves(
    toy_run: MakeToy, tmp_path: Path
) -> None:
    """The second process is let in at once, by what the first has left in the state directory."""
    run = toy_run(toy.spec(min_workers=2))
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


# --- a script that trains on the run's own data --------------------------------------------------------------------


def connected(coordinator: InThread, spec: RunSpec) -> tuple[DiLoCo, Optimizer]:
    model = build_model(spec, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    where = {"run": spec.name, "url": coordinator.url, "token": coordinator.token(Scope.WORKER)}
    return DiLoCo.connect(model, optimizer, **where, name="script", state_dir=None), optimizer


def train(coordinator: InThread, spec: RunSpec, root: Path) -> Exit:
    diloco, optimizer = connected(coordinator, spec)
    data = diloco.training_set(data_root=[str(root)])
    with diloco:
        for unit in diloco.units():
            tokens = data.unit(unit)
            logits = logits_of(diloco.model, tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            diloco.report_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
    return Exit.DONE


@pytest.mark.slow
def test_it_shares_a_run_with_outerstep_worker(coordinator: InThread, tmp_path: Path) -> None:
    create(coordinator, tmp_path, "words", 'preset = "tiny"', min_workers=2)
    spec = shown(coordinator, "words").spec
    done = at_once(
        {
            "worker": lambda: work(coordinator, tmp_path, "words", "worker"),
            "script": lambda: train(coordinator, spec, tmp_path),
        }
    )
    assert set(done.values()) == {Exit.DONE}
    wait_until(lambda: shown(coordinator, "words").state_digest is not None)
    assert shown(coordinator, "words").state is RunState.FINISHED


@pytest.mark.slow
def test_other_data_and_other_places_are_refused(coordinator: InThread, tmp_path: Path) -> None:
    create(coordinator, tmp_path, "words", 'preset = "tiny"')
    diloco, _ = connected(coordinator, shown(coordinator, "words").spec)
    with pytest.raises(NotAllowed, match="data.source"):
        diloco.training_set()
    with diloco, pytest.raises(RuntimeError, match="before `with`"):
        diloco.training_set(data_root=[str(tmp_path)])


@pytest.mark.slow
def test_a_script_with_other_data_cannot_join(coordinator: InThread, tmp_path: Path) -> None:
    create(coordinator, tmp_path, "words", 'preset = "tiny"')
    join(coordinator, "words")
    diloco, _ = connected(coordinator, shown(coordinator, "words").spec)
    diloco.training_set(str(write_chapters(tmp_path / "other", chapters=3, repeats=21)))
    with pytest.raises(Problem) as refused, diloco:
        pytest.fail("it joined")
    assert refused.value.slug == "data-mismatch"


def test_a_custom_run_has_none(toy_run: MakeToy) -> None:
    run, model = toy_run(), toy.make_model()
    with pytest.raises(ValueError, match="custom"):
        run.connect(model, torch.optim.SGD(model.parameters())).training_set()
