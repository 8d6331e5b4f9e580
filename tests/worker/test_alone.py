"""`outerstep worker --no-sync`: the baseline without communication."""

import itertools
import json
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from harness.coordinator import coordinator_thread
from outerstep.cli import app
from outerstep.common.exit_codes import Exit
from protocol.messages import Scope
from protocol.spec.run import RunSpec, parse_spec
from protocol.spec.sections import InnerSpec
from tests.support.text import write_chapters
from worker.accounts.step_log import StepLog
from worker.agent import run_alone
from worker.alone import AloneSteps, train_alone
from worker.box import Box, set_up
from worker.errors import BoxError, ModelError, Stopped
from worker.inner.loss import mean_loss
from worker.inner.schedules import learning_rate
from worker.settings import BoxSettings
from worker.state.state_dir import StateDir

CPU = torch.device("cpu")
ROUNDS, H = 3, 2


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    text = write_chapters(tmp_path / "text", chapters=4)
    return parse_spec(f"""
name = "text"
[model]
preset = "tiny"
[data]
source = "{text}"
sequence_length = 16
holdout = 0.1
[inner]
optimizer = "adamw"
batch_size = 2
learning_rate = 3e-3
warmup_steps = 2
[sync]
wait = "always"
rounds = {ROUNDS}
inner_steps = {H}
[evaluation]
max_tokens = 64
""")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def box_settings(tmp_path: Path, **changes: Any) -> BoxSettings:
    return BoxSettings(**{"name": "a", "state_dir": tmp_path / "state", "device": "cpu", **changes})


def trained(spec: RunSpec, box: Box, tmp_path: Path, stop: threading.Event) -> list[torch.Tensor]:
    with StateDir(tmp_path / "state") as files:
        train_alone(box, "a", files, stop)
    return [parameter.detach().clone() for parameter in box.model.parameters()]


def test_what_is_expected_is_this_round_and_the_next_and_not_all_of_the_run(spec: RunSpec, tmp_path: Path) -> None:
    """Of a set behind a URL all shards that are expected are fetched, and are not made room of."""
    box = set_up(spec, box_settings(tmp_path), CPU)
    with StateDir(tmp_path / "state") as files:
        steps = AloneSteps(box, "a", files, threading.Event(), None)
        seen = []
        for unit in steps.units():
            seen.append((unit, list(steps.upcoming())))
            steps.report_loss(torch.zeros(()))
            steps.count()
    assert seen == [(0, [1, 2, 3]), (1, [2, 3]), (2, [3, 4, 5]), (3, [4, 5]), (4, [5]), (5, [])]


def test_it_is_a_plain_training_loop_of_the_run_s_length(spec: RunSpec, tmp_path: Path) -> None:
    """Written out: the same batches, learning rates and clipping, and no outer step."""
    box = set_up(spec, box_settings(tmp_path), CPU)
    plain = set_up(spec, box_settings(tmp_path), CPU)
    optimizer = torch.optim.AdamW(plain.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for number in range(ROUNDS * H):
        optimizer.param_groups[0]["lr"] = learning_rate(spec, number, spec.inner.learning_rate)
        mean_loss(plain.model, plain.data.unit(number)).backward()
        torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert all(map(torch.equal, trained(spec, box, tmp_path, threading.Event()), plain.model.parameters()))


def test_stopped_in_the_middle_of_a_round_it_goes_on_where_that_began(spec: RunSpec, tmp_path: Path) -> None:
    undisturbed = trained(spec, set_up(spec, box_settings(tmp_path), CPU), tmp_path / "other", threading.Event())
    stop, box = threading.Event(), set_up(spec, box_settings(tmp_path), CPU)
    steps: list[int] = []

    def after(*_: object) -> None:
        steps.append(1)
        if len(steps) == H + 1:
            stop.set()

    box.optimizers[-1].register_step_post_hook(after)
    with pytest.raises(Stopped):
        trained(spec, box, tmp_path, stop)
    assert len(steps) == H + 1
    again = set_up(spec, box_settings(tmp_path), CPU)
    again.optimizers[-1].register_step_post_hook(after)
    assert all(map(torch.equal, trained(spec, again, tmp_path, threading.Event()), undisturbed))
    assert len(steps) == H + 1 + (ROUNDS - 1) * H


def test_the_scale_of_fp16_goes_on_where_it_was(spec: RunSpec, tmp_path: Path) -> None:
    """It began anew: other steps were skipped after a restart."""
    box = set_up(spec, box_settings(tmp_path, precision="fp16"), CPU)
    assert box.step.scaler is not None
    box.step.scaler.load_state_dict(box.step.scaler.state_dict() | {"scale": 1024.0})
    trained(spec, box, tmp_path, threading.Event())
    again = set_up(spec, box_settings(tmp_path, precision="fp16"), CPU)
    trained(spec, again, tmp_path, threading.Event())
    assert again.step.scaler is not None
    assert again.step.scaler.state_dict() == box.step.scaler.state_dict()
    assert again.step.scaler.get_scale() == 1024.0


def test_a_restart_does_not_tell_a_held_out_loss_again(spec: RunSpec, tmp_path: Path) -> None:
    """Stopped in the round after it, the worker measured it a second time, and the log had it twice."""
    log = tmp_path / "steps.jsonl"
    for stopped_after in (H + 1, None):
        stop, box, count = threading.Event(), set_up(spec, box_settings(tmp_path), CPU), itertools.count(1)
        box.optimizers[-1].register_step_post_hook(
            lambda *_, stop=stop, count=count, last=stopped_after: stop.set() if next(count) == last else None
        )
        ending = pytest.raises(Stopped) if stopped_after else nullcontext()
        with ending, StateDir(tmp_path / "state") as files, StepLog(log) as step_log:
            train_alone(box, "a", files, stop, step_log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["round"] for line in lines if "held_out_loss" in line] == list(range(ROUNDS + 1))


def spoil(box: Box) -> None:
    with torch.no_grad():
        next(box.model.parameters()).fill_(float("nan"))


def test_a_training_that_diverges_is_told_and_not_saved(spec: RunSpec, tmp_path: Path) -> None:
    box = set_up(spec, box_settings(tmp_path), CPU)
    box.optimizers[-1].register_step_post_hook(lambda *_: spoil(box))
    with pytest.raises(ModelError, match="round 0: the training has diverged: loss nan"):
        trained(spec, box, tmp_path, threading.Event())
    assert not (tmp_path / "state" / "alone.pt").exists()


def test_a_held_out_loss_that_is_not_a_number_is_told(spec: RunSpec, tmp_path: Path) -> None:
    """It was an unexpected fault, which says that starting again would help."""
    box = set_up(spec, box_settings(tmp_path), CPU)
    spoil(box)
    with pytest.raises(ModelError, match="the held-out loss is nan: the model's parameters are not finite"):
        trained(spec, box, tmp_path, threading.Event())


def test_the_snapshot_of_another_spec_is_neither_taken_nor_replaced(spec: RunSpec, tmp_path: Path) -> None:
    trained(spec, set_up(spec, box_settings(tmp_path), CPU), tmp_path, threading.Event())
    other = spec.model_copy(update={"seed": 5})
    box = set_up(other, box_settings(tmp_path), CPU)
    before = (tmp_path / "state" / "alone.pt").read_bytes()
    with pytest.raises(BoxError, match=r"alone\.pt is damaged, or .*delete it"):
        trained(other, box, tmp_path, threading.Event())
    assert (tmp_path / "state" / "alone.pt").read_bytes() == before


def test_the_command_s_body_tells_and_logs_the_held_out_loss(
    spec: RunSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    log = tmp_path / "steps.jsonl"
    assert run_alone(box_settings(tmp_path, log=log), spec, own_spec=True) == Exit.DONE
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    held_out = {line["round"]: line["held_out_loss"] for line in lines if "held_out_loss" in line}
    assert sorted(held_out) == list(range(ROUNDS + 1))
    assert held_out[ROUNDS] < held_out[0]
    steps = [line for line in lines if "unit" in line]
    assert [(line["round"], line["inner_step"], line["step"], line["unit"]) for line in steps] == [
        (number // H, number % H, number, number) for number in range(ROUNDS * H)
    ]
    assert steps[0]["learning_rate"] == pytest.approx(1.5e-3)
    assert f"state {ROUNDS}: held-out loss {held_out[ROUNDS]:.4f}" in caplog.text
    assert "round 0: loss" in caplog.text


def own_optimizer(model: nn.Module, inner: InnerSpec) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def test_the_log_has_the_learning_rate_of_an_optimizer_of_one_s_own(spec: RunSpec, tmp_path: Path) -> None:
    """It told the run's learning_rate, which that optimizer does not have."""
    inner = spec.inner.model_copy(update={"optimizer": f"{__name__}:own_optimizer"})
    log = tmp_path / "steps.jsonl"
    assert (
        run_alone(box_settings(tmp_path, log=log), spec.model_copy(update={"inner": inner}), own_spec=True) == Exit.DONE
    )
    first = json.loads(log.read_text().splitlines()[1])
    assert (first["step"], first["learning_rate"]) == (0, 0.25), "half of its own peak, of two warmup steps the first"


@pytest.mark.parametrize(
    ("changes", "said", "code"),
    [
        ({"precision": "tf32"}, "--precision tf32", Exit.USAGE),
        ({"precision": "fp16", "parameters": "bf16"}, "--parameters bf16 needs --precision bf16", Exit.USAGE),
        ({"log": Path("no/such/directory/steps.jsonl")}, "--log no/such/directory/steps.jsonl: No such", Exit.REFUSED),
    ],
)
def test_settings_that_do_not_suit_are_refused(
    spec: RunSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], said: str, code: Exit
) -> None:
    assert run_alone(box_settings(tmp_path, **changes), spec, own_spec=True) == code
    assert said in caplog.text


@pytest.mark.parametrize("changes", [{"precision": "fp16"}, {"precision": "bf16"}, {"parameters": "bf16"}])
def test_every_precision_learns(spec: RunSpec, tmp_path: Path, changes: dict[str, Any]) -> None:
    box = set_up(spec, box_settings(tmp_path, **changes), CPU)
    assert box.evaluate is not None
    before = box.evaluate().loss
    trained(spec, box, tmp_path, threading.Event())
    assert box.evaluate().loss < before


def test_the_command_takes_the_spec_from_the_coordinator_or_from_a_file(
    spec: RunSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither joins the run: it stays as it is, and the same command again has nothing left to do."""
    caplog.set_level("INFO")
    toml = tmp_path / "run.toml"
    toml.write_text(
        f'name = "text"\ndata.source = "{spec.data.source}"\ndata.sequence_length = 16\ninner.batch_size = 2\n'
        'model.preset = "tiny"\nsync.rounds = 2\nsync.inner_steps = 1\nevaluation.max_tokens = 64\n'
    )
    state = ["--state", str(tmp_path / "state"), "--device", "cpu", "--name", "a"]
    with coordinator_thread(tmp_path / "coordinator") as coordinator:
        coordinator.create_run(toml.read_text())
        url = [coordinator.url, "--run", "text", "--token", coordinator.token(Scope.VIEWER)]
        assert CliRunner().invoke(app, ["worker", *url, "--no-sync", *state]).exit_code == Exit.REFUSED
        assert caplog.messages[-1].endswith(f"add: --data-root {spec.data.source}")
        root = ["--data-root", spec.data.source]
        assert CliRunner().invoke(app, ["worker", *url, "--no-sync", *state, *root]).exit_code == Exit.DONE
        with coordinator.client() as http:
            assert http.get("/v1/runs/text/workers").json()["items"] == []
    assert "state 2: held-out loss" in caplog.text
    caplog.clear()
    assert CliRunner().invoke(app, ["worker", "--no-sync", "--spec", str(toml), *state]).exit_code == Exit.DONE
    assert "resuming at round 2" in caplog.text
    assert "round 0" not in caplog.text
