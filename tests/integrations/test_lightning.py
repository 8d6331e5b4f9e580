"""Lightning's Trainer as a worker: real processes, a model of one layer."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.coordinator import InThread, coordinator_thread
from protocol.messages import RunDetail, WorkerInfo
from tests.integrations import script
from tests.integrations.script import Script, result
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

H, ROUNDS = 3, 3
TOTAL = H * ROUNDS

SPEC = f"""
name = "light"
[data]
source = "custom"
sequence_length = 8
[inner]
batch_size = 4
[sync]
wait = "always"
rounds = {ROUNDS}
inner_steps = {H}
upload_codec = "int8"
fragment_elements = 1024
"""

SCRIPT = """
import json, sys, torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from outerstep.integrations.lightning import DiLoCoCallback
from worker.state.parameters import trainable_parameters
from protocol.digest import digest

how = json.loads(sys.argv[1])
told = {"rows": [], "rates": [], "steps": []}
seed_everything(0)

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, row):
        return row, torch.randn(8, generator=torch.Generator().manual_seed(row))

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def training_step(self, batch, _):
        rows, x = batch
        told["rows"] += rows.tolist()
        return (self.layer(x) - x.flip(1)).square().mean()
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": scheduler, "interval": how["interval"]}]

callback = DiLoCoCallback("light", name=how["name"])

class Watch(Callback):
    def on_fit_start(self, trainer, module):
        optimizer, = trainer.optimizers
        optimizer.register_step_post_hook(lambda *_: told["rates"].append(optimizer.param_groups[0]["lr"]))
    def on_train_batch_start(self, trainer, module, batch, index):
        if index % 2 == 0:
            told["steps"].append(callback.diloco.global_step)
        elif len(told["steps"]) == how["stop_after"]:
            callback.diloco.client.stop.set()
    def on_train_batch_end(self, trainer, module, *_):
        if len(told["rates"]) == how["end_after"]:
            trainer.should_stop = True

model = Module()
trainer = Trainer(accelerator="cpu", accumulate_grad_batches=2, callbacks=[Watch(), callback], logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                  devices=how["devices"], strategy="ddp" if how["devices"] > 1 else "auto")
generator = torch.Generator().manual_seed(0) if how["seeded"] else None
trainer.fit(model, torch.utils.data.DataLoader(Rows(), batch_size=2, shuffle=how["shuffle"], generator=generator))
vector = torch.cat([each.detach().reshape(-1) for each in trainable_parameters(model).values()])
said = json.dumps({**told, "digest": digest(vector.numpy().tobytes()).hex()})
sys.stdout.write(f"\\n{said}\\n")  # in one write: torchrun's processes share a pipe, and print makes two
"""


HOW: dict[str, Any] = {
    "name": "a",
    "stop_after": -1,
    "end_after": -1,
    "interval": "step",
    "shuffle": True,
    "seeded": False,
    "devices": 1,
}


def start(running: InThread, directory: Path, **how: Any) -> Script:
    how = HOW | how
    return script.start(running, SCRIPT, directory, how["devices"], **how)


def told(running: InThread, name: str) -> WorkerInfo:
    return script.told(running, "light", name)


def linear(steps: list[int]) -> Any:
    return pytest.approx([0.01 * (1 - step / TOTAL) for step in steps])


def test_two_of_them_end_with_the_same_model_and_have_trained_on_other_data(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(f"{SPEC}[members]\nmin_workers = 2\n")
        a, b = map(result, [start(running, tmp_path, name=name) for name in "ab"])
        with running.client() as http:
            wait_until(lambda: http.get("/v1/runs/light").json()["state_digest"] is not None)
            run = RunDetail.model_validate(http.get("/v1/runs/light").json())
            rounds = http.get("/v1/runs/light/rounds").json()["items"]
        assert run.state == "finished"
        assert told(running, "a").state_digest == told(running, "b").state_digest == run.state_digest
    assert a["digest"] == b["digest"]
    assert a["steps"] == b["steps"] == list(range(TOTAL))
    assert a["rates"] == b["rates"] == linear(a["steps"])
    assert run.tokens == 2 * TOTAL * 4 * 8
    assert all(each["loss"] > 0 for each in rounds)
    assert len(set(a["rows"])) == len(set(b["rows"])) == 4 * TOTAL
    assert a["rows"] != b["rows"]


@pytest.mark.nightly
@pytest.mark.usefixtures("one_h")
def test_they_train_on_while_they_would_wait(tmp_path: Path) -> None:
    """The last round has its H steps alone, and nothing that was carried into it is lost."""
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC.replace('wait = "always"', 'wait = "never"') + "[members]\nmin_workers = 2\n")
        a, b = map(result, [start(running, tmp_path, name=name) for name in "ab"])
        with running.client() as http:
            wait_until(lambda: http.get("/v1/runs/light").json()["state_digest"] is not None)
            run = RunDetail.model_validate(http.get("/v1/runs/light").json())
        assert told(running, "a").state_digest == told(running, "b").state_digest == run.state_digest
    assert a["digest"] == b["digest"]
    assert len(set(a["rows"][:64])) == len(a["rows"][:64]), "an epoch has each row once"
    assert run.tokens == (len(a["rows"]) + len(b["rows"])) * 8 >= 2 * TOTAL * 4 * 8


@pytest.mark.nightly
def test_several_processes_of_torchrun_are_one_worker(tmp_path: Path) -> None:
    """They share the batch, and the order of the data, of which each has its own."""
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC.replace("batch_size = 4", "batch_size = 8"))
        process = start(running, tmp_path, devices=2)
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        a, b = (json.loads(line) for line in out.splitlines() if line.startswith('{"rows"'))
        with running.client() as http:
            wait_until(lambda: http.get("/v1/runs/light").json()["state_digest"] is not None)
            run = RunDetail.model_validate(http.get("/v1/runs/light").json())
        assert told(running, "a").state_digest == run.state_digest
    assert "cannot set the order" not in errors
    assert a["digest"] == b["digest"]
    assert a["steps"] == b["steps"] == list(range(TOTAL))
    assert run.tokens == TOTAL * 8 * 8
    rows = [*a["rows"][:16], *b["rows"][:16]]
    assert len(set(rows)) == 32, "no row is trained on twice in an epoch"


@pytest.mark.nightly
def test_one_that_is_stopped_hands_in_and_a_late_one_is_at_the_run_s_step(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC)
        a = result(start(running, tmp_path, stop_after=H + 1))
        assert a["steps"] == list(range(H + 1))
        assert "the Trainer ended" not in a["errors"], "it was told to"
        assert "cannot set the order" not in a["errors"]
        assert (told(running, "a").state, told(running, "a").tokens) == ("left", (H + 1) * 4 * 8)
        b = result(start(running, tmp_path, name="b"))
        with running.client() as http:
            assert http.get("/v1/runs/light").json()["state"] == "finished"
    assert b["steps"] == list(range(H + 1, TOTAL)), "where the other one has left off"
    assert b["rates"] == linear(b["steps"])


@pytest.mark.parametrize("order", [{"shuffle": False}, {"seeded": True}], ids=["as they are", "by a generator"])
def test_what_a_script_should_hear_of_is_told(tmp_path: Path, order: dict[str, bool]) -> None:
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC)
        a = result(start(running, tmp_path, end_after=2, **order))
        assert "the Trainer ended at step 2" in a["errors"]
        assert "cannot set the order" in a["errors"]
        assert told(running, "a").tokens == 2 * 4 * 8, "what it did is handed in"


def test_another_batch_than_the_runs_is_refused(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC.replace("batch_size = 4", "batch_size = 8"))
        process = start(running, tmp_path)
        _, errors = process.communicate()
        assert process.returncode != 0
        assert "takes 4 sequences" in errors
        with running.client() as http:
            wait_until(lambda: http.get("/v1/runs/light").json()["live_workers"] == 0)
            assert http.get("/v1/runs/light").json()["tokens"] == 0


def test_a_rate_by_epochs_is_refused_before_the_run_is_joined(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC)
        process = start(running, tmp_path, interval="epoch")
        _, errors = process.communicate()
        assert process.returncode != 0
        assert "the learning rate is scheduled by epoch" in errors
        with running.client() as http:
            assert http.get("/v1/runs/light").json()["live_workers"] == 0
