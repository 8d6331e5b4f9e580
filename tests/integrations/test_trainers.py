"""Trainers as workers, that of transformers and Lightning's: real processes, a model of one layer."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from harness.coordinator import InThread, coordinator_thread
from protocol.messages import Scope
from tests.integrations import script
from tests.integrations.script import SPEC, TOTAL, H, Script, result, told
from tests.support.cases import in_the_night
from tests.support.shown import finished
from tests.support.waiting import wait_until
from worker.errors import BoxError

pytestmark = pytest.mark.system

SCRIPTS = {
    "transformers": """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from outerstep.integrations.transformers import DiLoCoCallback

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, row):
        told["rows"].append(row)
        ids = torch.randint(64, (8,), generator=torch.Generator().manual_seed(row))
        return {"input_ids": ids, "labels": ids}

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2))
arguments = TrainingArguments(how["name"], per_device_train_batch_size=2, gradient_accumulation_steps=accumulate, use_cpu=True,
                              logging_steps=1, learning_rate=0.01, report_to=[], save_strategy="no", disable_tqdm=True,
                              ddp_backend="gloo" if "RANK" in os.environ else None)
callback = DiLoCoCallback("trained", name=how["name"])

class Watch(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, optimizer, **_):
        told["steps"].append(callback.diloco.global_step)
        told["rates"].append(optimizer.param_groups[0]["lr"])
        if len(told["steps"]) == how["stop_after"]:
            callback.diloco.client.stop.set()

    def on_step_end(self, args, state, control, **_):
        if len(told["steps"]) == how["end_after"]:
            control.should_training_stop = True

trainer = Trainer(model, arguments, train_dataset=Rows(), callbacks=[Watch(), callback])
trainer.train()
told["losses"] = [each["loss"] for each in trainer.state.log_history if "loss" in each]
tell(model)
""",
    "lightning": """
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from outerstep.integrations.lightning import DiLoCoCallback

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

callback = DiLoCoCallback("trained", name=how["name"])

class Watch(Callback):
    def on_fit_start(self, trainer, module):
        optimizer, = trainer.optimizers
        optimizer.register_step_post_hook(lambda *_: told["rates"].append(optimizer.param_groups[0]["lr"]))
    def on_train_batch_start(self, trainer, module, batch, index):
        if index % accumulate == 0:
            told["steps"].append(callback.diloco.global_step)
        elif len(told["steps"]) == how["stop_after"]:
            callback.diloco.client.stop.set()
    def on_train_batch_end(self, trainer, module, *_):
        if len(told["rates"]) == how["end_after"]:
            trainer.should_stop = True

model = Module()
trainer = Trainer(accelerator="cpu", accumulate_grad_batches=accumulate, callbacks=[Watch(), callback], logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                  devices=how["processes"], strategy="ddp" if how["processes"] > 1 else "auto")
generator = torch.Generator().manual_seed(0) if how["seeded"] else None
trainer.fit(model, torch.utils.data.DataLoader(Rows(), batch_size=2, shuffle=how["shuffle"], generator=generator))
tell(model)
""",
}
HOW: dict[str, Any] = {"name": "a", "processes": 1, "stop_after": -1, "end_after": -1}
HOW |= {"interval": "step", "shuffle": True, "seeded": False}  # of Lightning alone


def start(running: InThread, directory: Path, trainer: str, **how: Any) -> Script:
    return script.start(running, SCRIPTS[trainer], directory, **HOW | how)


def linear(steps: list[int]) -> Any:
    """The rates of a schedule without warmup."""
    return pytest.approx([0.01 * (1 - step / TOTAL) for step in steps])


@pytest.mark.parametrize("trainer", [in_the_night("transformers"), "lightning"])
def test_two_of_them_end_with_the_same_model_and_have_trained_on_other_data(tmp_path: Path, trainer: str) -> None:
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(f"{SPEC}[members]\nmin_workers = 2\n")
        a, b = map(result, [start(running, tmp_path, trainer, name=name) for name in "ab"])
        run = finished(running, "trained")
        with running.client() as http:
            rounds = http.get("/v1/runs/trained/rounds").json()["items"]
        assert run.state == "finished"
        assert told(running, "a").state_digest == told(running, "b").state_digest == run.state_digest
    assert a["digest"] == b["digest"]
    assert a["steps"] == b["steps"] == list(range(TOTAL))
    assert a["rates"] == b["rates"] == linear(a["steps"])
    assert run.tokens == 2 * TOTAL * 4 * 8, "four sequences of eight tokens per step, however they are accumulated"
    assert all(each["loss"] > 0 for each in rounds)
    count = 4 * TOTAL
    assert len(set(a["rows"][:count])) == len(set(b["rows"][:count])) == count
    assert a["rows"][:count] != b["rows"][:count]
    if trainer == "lightning":  # that of transformers fetches some in advance
        assert len(a["rows"]) == len(b["rows"]) == count


@pytest.mark.nightly
@pytest.mark.parametrize("trainer", SCRIPTS)
def test_several_processes_of_torchrun_are_one_worker(tmp_path: Path, trainer: str) -> None:
    """They share the batch, and the order of the data, of which each has its own."""
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC)
        process = start(running, tmp_path, trainer, processes=2)
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        a, b = (json.loads(line) for line in out.splitlines() if line.startswith('{"rows"'))
        run = finished(running, "trained")
        assert told(running, "a").state_digest == run.state_digest
    assert "cannot set the order" not in errors
    assert a["digest"] == b["digest"]
    assert a["steps"] == b["steps"] == list(range(TOTAL))
    assert run.tokens == TOTAL * 4 * 8
    count = 2 * TOTAL
    assert len({*a["rows"][:count], *b["rows"][:count]}) == 2 * count, "no row is trained on twice in an epoch"


@pytest.mark.parametrize("trainer", ["transformers", in_the_night("lightning")])
def test_one_that_is_stopped_hands_in_and_a_late_one_is_at_the_run_s_step(tmp_path: Path, trainer: str) -> None:
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC)
        a = result(start(running, tmp_path, trainer, stop_after=H + 1))
        assert a["steps"] == list(range(H + 1))
        assert "the Trainer ended" not in a["errors"], "it was told to"
        assert "cannot set the order" not in a["errors"]
        assert (told(running, "a").state, told(running, "a").tokens) == ("left", (H + 1) * 4 * 8)
        b = result(start(running, tmp_path, trainer, name="b"))
        with running.client() as http:
            assert http.get("/v1/runs/trained").json()["state"] == "finished"
    assert b["steps"] == list(range(H + 1, TOTAL)), "where the other one has left off"
    assert b["rates"] == linear(b["steps"])
    if trainer == "transformers":
        assert all(3 < loss < 5 for loss in a["losses"] + b["losses"]), "near log 64 nats, from the first on"


@pytest.mark.parametrize(
    ("trainer", "order"),
    [("transformers", {}), ("lightning", {"shuffle": False}), ("lightning", {"seeded": True})],
    ids=["transformers", "lightning, rows as they are", "lightning, rows by a generator"],
)
def test_what_a_script_should_hear_of_is_told(tmp_path: Path, trainer: str, order: dict[str, bool]) -> None:
    """Another callback has ended the training, and the run goes on; and rows are not in the order of the run."""
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC)
        a = result(start(running, tmp_path, trainer, end_after=H + 1, **order))
        assert a["steps"] == list(range(H + 1))
        assert f"the Trainer ended at step {H + 1}" in a["errors"]
        assert ("cannot set the order" in a["errors"]) == (order != {})
        assert told(running, "a").state == "left"
        assert told(running, "a").tokens == (H + 1) * 4 * 8, "what it did is handed in"


@pytest.mark.nightly
@pytest.mark.usefixtures("one_h")
def test_lightning_trains_on_while_it_would_wait(tmp_path: Path) -> None:
    """The last round has its H steps alone, and nothing that was carried into it is lost."""
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC.replace('wait = "always"', 'wait = "never"') + "[members]\nmin_workers = 2\n")
        a, b = map(result, [start(running, tmp_path, "lightning", name=name) for name in "ab"])
        run = finished(running, "trained")
        assert told(running, "a").state_digest == told(running, "b").state_digest == run.state_digest
    assert a["digest"] == b["digest"]
    assert len(set(a["rows"][:64])) == len(a["rows"][:64]), "an epoch has each row once"
    assert run.tokens == (len(a["rows"]) + len(b["rows"])) * 8 >= 2 * TOTAL * 4 * 8


def test_two_trainers_of_unequal_speed_end_together(tmp_path: Path) -> None:
    """Each takes the steps that it manages, and none beyond them: the Trainer knows how many they are at most."""
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC.replace('wait = "always"\n', "") + "[members]\nmin_workers = 2\n")
        a, b = map(result, [start(running, tmp_path, "transformers", name=name) for name in "ab"])
        run = finished(running, "trained")
        assert run.state == "finished"
        assert told(running, "a").state_digest == told(running, "b").state_digest == run.state_digest
    assert a["digest"] == b["digest"]
    for each in (a, b):
        assert each["steps"] == sorted(set(each["steps"])), "the run's steps, some of which a slower one skips"
        assert len(each["steps"]) <= each["steps"][-1] + 1 <= TOTAL
    assert run.tokens == (len(a["steps"]) + len(b["steps"])) * 4 * 8


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True},
            "load_best_model_at_end=True",
        ),
        # Trainers with 16 and 64 sequences per step were counted as equal work.
        (
            {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4},
            r"takes 64 sequences, 16 .* 4 .*inner.batch_size = 4",
        ),
    ],
    ids=["the best model at the end", "another batch than the run's"],
)
def test_what_does_not_fit_the_run_is_refused_with_transformers(
    tmp_path: Path, given: dict[str, Any], told: str
) -> None:
    from transformers import Trainer, TrainingArguments

    from outerstep.integrations.transformers import DiLoCoCallback

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, **given)
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC)
        callback = DiLoCoCallback("trained", url=running.url, token=running.token(Scope.WORKER))
        with pytest.raises(BoxError, match=told):
            Trainer(nn.Linear(2, 2), arguments, eval_dataset=[0], callbacks=[callback])


@pytest.mark.parametrize(
    ("batch", "interval", "joins", "told"),
    [(8, "step", True, "takes 4 sequences"), (4, "epoch", False, "the learning rate is scheduled by epoch")],
)
def test_what_does_not_fit_the_run_is_refused_with_lightning(
    tmp_path: Path, batch: int, interval: str, joins: bool, told: str
) -> None:
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC.replace("batch_size = 4", f"batch_size = {batch}"))
        process = start(running, tmp_path, "lightning", interval=interval)
        _, errors = process.communicate()
        assert process.returncode != 0
        assert told in errors
        with running.client() as http:
            wait_until(lambda: http.get("/v1/runs/trained").json()["live_workers"] == 0)
            assert http.get("/v1/runs/trained").json()["tokens"] == 0
            assert joins or http.get("/v1/runs/trained/workers").json()["items"] == []
