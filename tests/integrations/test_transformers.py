"""transformers' Trainer as a worker: real processes, a model of one layer."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from harness.coordinator import InThread, coordinator_thread
from protocol.messages import RunDetail, Scope, WorkerInfo
from tests.integrations import script
from tests.integrations.script import Script, result
from tests.support.waiting import wait_until
from worker.errors import BoxError

pytestmark = pytest.mark.system

H, ROUNDS = 3, 3

SPEC = f"""
name = "trainer"
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
import json, os, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from outerstep.integrations.transformers import DiLoCoCallback
from worker.state.parameters import trainable_parameters
from protocol.digest import digest

how = json.loads(sys.argv[1])
name, stop_after, end_after = how["name"], how["stop_after"], how["end_after"]
told = {"rows": [], "rates": [], "steps": []}

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
arguments = TrainingArguments(name, per_device_train_batch_size=2, gradient_accumulation_steps=how["accumulate"], use_cpu=True,
                              logging_steps=1, learning_rate=0.01, report_to=[], save_strategy="no", disable_tqdm=True,
                              ddp_backend="gloo" if "RANK" in os.environ else None)
callback = DiLoCoCallback("trainer", name=name)

class Watch(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, optimizer, **_):
        told["steps"].append(callback.diloco.global_step)
        told["rates"].append(optimizer.param_groups[0]["lr"])
        if len(told["steps"]) == stop_after:
            callback.diloco.client.stop.set()

    def on_step_end(self, args, state, control, **_):
        if len(told["steps"]) == end_after:
            control.should_training_stop = True

trainer = Trainer(model, arguments, train_dataset=Rows(), callbacks=[Watch(), callback])
trainer.train()
told["losses"] = [each["loss"] for each in trainer.state.log_history if "loss" in each]
vector = torch.cat([each.detach().reshape(-1) for each in trainable_parameters(model).values()])
said = json.dumps({**told, "digest": digest(vector.numpy().tobytes()).hex()})
sys.stdout.write(f"\\n{said}\\n")  # in one write: torchrun's processes share a pipe, and print makes two
"""


def start(
    running: InThread, name: str, directory: Path, stop_after: int = 0, end_after: int = 0, processes: int = 1
) -> Script:
    how = {"name": name, "stop_after": stop_after, "end_after": end_after, "accumulate": 2 // processes}
    return script.start(running, SCRIPT, directory, processes, **how)


def told(running: InThread, name: str) -> WorkerInfo:
    return script.told(running, "trainer", name)


def test_two_trainers_end_with_the_same_model_and_have_trained_on_other_data(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(f"{SPEC}[members]\nmin_workers = 2\n")
        a, b = map(result, [start(running, name, tmp_path) for name in "ab"])
        with running.client() as http:
            wait_until(lambda: http.get("/v1/runs/trainer").json()["state_digest"] is not None)
            run = RunDetail.model_validate(http.get("/v1/runs/trainer").json())
            rounds = http.get("/v1/runs/trainer/rounds").json()["items"]
        assert run.state == "finished"
        assert told(running, "a").state_digest == told(running, "b").state_digest == run.state_digest
    assert a["digest"] == b["digest"]
    assert a["steps"] == b["steps"] == list(range(ROUNDS * H))
    assert run.tokens == 2 * ROUNDS * H * 4 * 8, "four sequences of eight tokens per step, however they are accumulated"
    assert all(each["loss"] > 0 for each in rounds)
    count = ROUNDS * H * 4
    assert len(set(a["rows"][:count])) == len(set(b["rows"][:count])) == count
    assert a["rows"][:count] != b["rows"][:count]


@pytest.mark.nightly
def test_several_processes_of_torchrun_are_one_worker(tmp_path: Path) -> None:
    """They share the batch, and the order of the data, of which each has its own."""
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC)
        process = start(running, "a", tmp_path, processes=2)
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        a, b = (json.loads(line) for line in out.splitlines() if line.startswith('{"rows"'))
        with running.client() as http:
            wait_until(lambda: http.get("/v1/runs/trainer").json()["state_digest"] is not None)
            run = RunDetail.model_validate(http.get("/v1/runs/trainer").json())
        assert told(running, "a").state_digest == run.state_digest
    assert told_of(a) == told_of(b) == (list(range(ROUNDS * H)), a["digest"])
    assert run.tokens == ROUNDS * H * 4 * 8
    count = ROUNDS * H * 2
    assert len({*a["rows"][:count], *b["rows"][:count]}) == 2 * count


def told_of(result: dict[str, Any]) -> tuple[list[int], str]:
    return result["steps"], result["digest"]


def test_one_that_is_stopped_hands_in_and_a_late_one_is_at_the_run_s_step(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC)
        a = result(start(running, "a", tmp_path, stop_after=H + 1))
        assert a["steps"] == list(range(H + 1))
        assert "the Trainer ended" not in a["errors"], "it was told to"
        assert told(running, "a").state == "left"
        assert told(running, "a").tokens == (H + 1) * 4 * 8
        b = result(start(running, "b", tmp_path))
        with running.client() as http:
            assert http.get("/v1/runs/trainer").json()["state"] == "finished"
    assert b["steps"] == list(range(H + 1, ROUNDS * H)), "where the other one has left off"
    linear = [0.01 * (1 - step / (ROUNDS * H)) for step in b["steps"]]  # the Trainer's schedule, without warmup
    assert b["rates"] == pytest.approx(linear)
    assert all(3 < loss < 5 for loss in a["losses"] + b["losses"]), "near log 64 nats, from the first on"


def test_another_callback_may_end_the_training_and_that_the_run_goes_on_is_told(tmp_path: Path) -> None:
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC)
        a = result(start(running, "a", tmp_path, end_after=H + 1))
        assert a["steps"] == list(range(H + 1))
        assert f"the Trainer ended at step {H + 1} of {ROUNDS * H}" in a["errors"]
        assert told(running, "a").state == "left"
        assert told(running, "a").tokens == (H + 1) * 4 * 8, "what it did is handed in"


def test_to_load_the_best_model_at_the_end_is_refused(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from outerstep.integrations.transformers import DiLoCoCallback

    arguments = TrainingArguments(
        str(tmp_path), eval_strategy="steps", save_strategy="steps", load_best_model_at_end=True, use_cpu=True
    )
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC)
        callback = DiLoCoCallback("trainer", url=running.url, token=running.token(Scope.WORKER))
        with pytest.raises(BoxError, match="load_best_model_at_end=True"):
            Trainer(nn.Linear(2, 2), arguments, eval_dataset=[0], callbacks=[callback])


def test_another_batch_than_the_runs_is_refused(tmp_path: Path) -> None:
    """Trainers with 16 and 64 sequences per step were counted as equal work."""
    from transformers import Trainer, TrainingArguments

    from outerstep.integrations.transformers import DiLoCoCallback

    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=16, gradient_accumulation_steps=4, use_cpu=True
    )
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC)
        callback = DiLoCoCallback("trainer", url=running.url, token=running.token(Scope.WORKER))
        with pytest.raises(BoxError, match=r"takes 64 sequences, 16 .* 4 .*inner.batch_size = 4"):
            Trainer(nn.Linear(2, 2), arguments, callbacks=[callback])


def test_two_trainers_of_unequal_speed_end_together(tmp_path: Path) -> None:
    """Each takes the steps that it manages, and none beyond them: the Trainer knows how many they are at most."""
    with coordinator_thread(tmp_path / "coordinator") as running:
        running.create_run(SPEC.replace('wait = "always"\n', "") + "[members]\nmin_workers = 2\n")
        a, b = map(result, [start(running, name, tmp_path) for name in "ab"])
        with running.client() as http:
            wait_until(lambda: http.get("/v1/runs/trainer").json()["state_digest"] is not None)
            run = RunDetail.model_validate(http.get("/v1/runs/trainer").json())
        assert run.state == "finished"
        assert told(running, "a").state_digest == told(running, "b").state_digest == run.state_digest
    assert a["digest"] == b["digest"]
    for each in (a, b):
        assert each["steps"] == sorted(set(each["steps"])), "the run's steps, some of which a slower one skips"
        assert len(each["steps"]) <= each["steps"][-1] + 1 <= ROUNDS * H
    assert run.tokens == (len(a["steps"]) + len(b["steps"])) * 4 * 8
