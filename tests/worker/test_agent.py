"""The worker process's body: settings, exit codes, and a whole run of real text with its export."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from harness.coordinator import InThread
from outerstep.common.exit_codes import Exit
from protocol.messages import JoinRequest, RunDetail, RunState, Scope, WorkerInfo
from tests.support.specs import tiny_spec
from tests.support.text import write_chapters
from tests.support.tokenizers import write_tokenizer
from tests.support.waiting import wait_until
from tests.support.workers import worker_settings
from tests.worker import toy
from tests.worker.runs import shown
from worker.agent import run_worker
from worker.data.open_training_set import open_training_set
from worker.export import export, load_checkpoint, sample
from worker.link.client import Client, open_http
from worker.models.building import build_model
from worker.settings import WorkerSettings
from worker.state.parameters import tensor_specs

pytestmark = pytest.mark.slow

RUN = """
name = "text"
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
[sync]
wait = "always"
rounds = {rounds}
inner_steps = 3
fragment_elements = 60_000
[evaluation]
max_tokens = 512
"""


def settings(coordinator: InThread, tmp_path: Path, run: str = "text", **changes: Any) -> WorkerSettings:
    return worker_settings(coordinator, run, tmp_path / "state", **changes)


def test_a_run_of_text_and_its_export(
    coordinator: InThread, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    coordinator.create_run(RUN.format(source=text, rounds=4))
    own = settings(coordinator, tmp_path, peak_flops=1e15, step_log=tmp_path / "steps.jsonl")
    assert run_worker(own) == Exit.DONE
    with coordinator.client() as http:
        wait_until(lambda: http.get("/v1/runs/text").json()["state_digest"] is not None)
        run = RunDetail.model_validate(http.get("/v1/runs/text").json())
        worker = WorkerInfo.model_validate(http.get("/v1/runs/text/workers/a").json())
        rounds = http.get("/v1/runs/text/rounds").json()["items"]
    assert run.state == "finished"
    assert run.state_digest == worker.state_digest
    assert rounds[-1]["held_out_loss"] == pytest.approx(5.55, abs=0.1)
    assert run.held_out_loss is not None
    assert run.held_out_loss < rounds[-1]["held_out_loss"]
    assert worker.host["device"].startswith("cpu")  # type: ignore[union-attr]
    assert worker.metrics.upload_bytes > 0
    assert worker.metrics.mfu is not None
    assert 0 < worker.metrics.mfu < 1
    assert worker.metrics.peak_memory_bytes is not None
    assert worker.metrics.learning_rate is not None
    line = next(each for each in caplog.messages if each.startswith("round 3: loss "))
    assert re.match(r"round 3: loss \d\.\d{4} [▁-█]{4}, rate \d\.\d\de-\d\d, \d+ tokens/s, ", line), line
    assert re.search(r"; elapsed [\d.]+ s, to go 0\.0 s; seconds: ", line), line
    assert worker.host["precision"] == "fp32"
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [(line["round"], line["inner_step"]) for line in lines] == [divmod(step, 3) for step in range(12)]
    last = sum(line["loss"] for line in lines[-3:]) / 3
    assert rounds[0]["loss"] == pytest.approx(last, rel=1e-5)

    with open_http(coordinator.url) as http:
        client = Client(http, "text", coordinator.token(Scope.VIEWER))
        model = export(client, tmp_path / "model")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        tokens = torch.arange(20)[None]
        torch.testing.assert_close(model(tokens).logits, loaded(tokens).logits)
        assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
        assert len(sample(loaded, b"all ", 10, torch.Generator().manual_seed(0))) == 10
        assert (tmp_path / "model" / "spec.toml").read_text() == RUN.format(source=text, rounds=4)
        with pytest.raises(FileExistsError, match="choose another"):
            export(client, tmp_path / "model")
        first = load_checkpoint(client, 0)
        assert not torch.equal(first(tokens).logits, loaded(tokens).logits)

    assert run_worker(settings(coordinator, tmp_path)) == Exit.DONE, "a finished run has nothing to do"


@pytest.mark.parametrize(
    "keys",
    [
        'optimizer = "muon"\nschedule = "wsd"\nclip_norm = "none"\n',
        'optimizer = "tests.worker.test_inner_optimizers:sgd_for_each"\nschedule = "linear"\n',
    ],
)
def test_a_run_with_another_optimizer(coordinator: InThread, text: Path, tmp_path: Path, keys: str) -> None:
    coordinator.create_run(RUN.format(source=text, rounds=4).replace("[inner]\n", f"[inner]\n{keys}"))
    own = ("tests.worker.test_inner_optimizers:sgd_for_each",)
    assert run_worker(settings(coordinator, tmp_path, allow_code=own)) == Exit.DONE
    with coordinator.client() as http:
        wait_until(lambda: http.get("/v1/runs/text").json()["state_digest"] is not None)
        run = RunDetail.model_validate(http.get("/v1/runs/text").json())
        worker = WorkerInfo.model_validate(http.get("/v1/runs/text/workers/a").json())
        first = http.get("/v1/runs/text/rounds").json()["items"][-1]
    assert (run.state, run.state_digest) == ("finished", worker.state_digest)
    assert run.tokens == 4 * 3 * run.spec.unit_tokens
    assert run.held_out_loss is not None
    assert run.held_out_loss < first["held_out_loss"]


def test_a_signal_leaves_cleanly(coordinator: InThread, text: Path, tmp_path: Path) -> None:
    """In the middle of a run: the units go back, the exit code says done, and the handlers are what they were."""
    coordinator.create_run(RUN.format(source=text, rounds=10_000))
    before = signal.getsignal(signal.SIGTERM)

    def send() -> None:
        with coordinator.client() as http:
            wait_until(lambda: http.get("/v1/runs/text").json()["round"] >= 2)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    ended: list[int] = []
    assert run_worker(settings(coordinator, tmp_path), end_process=ended.append) == Exit.DONE
    sender.join()
    assert ended == []
    assert signal.getsignal(signal.SIGTERM) == before
    with coordinator.client() as http:
        worker = WorkerInfo.model_validate(http.get("/v1/runs/text/workers/a").json())
    assert worker.state == "left"


def test_refusals_and_their_exit_codes(
    coordinator: InThread, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator.create_run(RUN.format(source=text, rounds=2))

    def code(message: str, **changes: Any) -> int:
        caplog.clear()
        result = run_worker(settings(coordinator, tmp_path, **changes))
        assert message in caplog.text
        return result

    caplog.set_level(logging.INFO)
    assert code("not-found", run="other") == Exit.REFUSED
    assert code("unauthorized", token="wrong") == Exit.REFUSED
    assert code("forbidden", token=coordinator.token(Scope.VIEWER)) == Exit.REFUSED
    assert code("device 'cuda:99' cannot be used", device="cuda:99") == Exit.USAGE
    assert code("device 'gpu' cannot be used", device="gpu") == Exit.USAGE
    (text / "more.txt").write_text("another training set")
    coordinator.create_run(RUN.format(source=f"{tmp_path}/nothing", rounds=2).replace('"text"', '"empty"'))
    assert code("a worker's --data", run="empty") == Exit.REFUSED
    coordinator.create_run(toy.spec())
    assert code("its workers are scripts", run="toy") == Exit.REFUSED


USERS_OWN = """
import torch
def fails():
    return dict()["weights"]
def huge():
    return torch.nn.Linear(1 << 24, 1 << 24)
def late():
    return Late()
class Late(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 256)
    def forward(self, tokens):
        return torch.empty(1 << 50)
def unmoved():
    return Unmoved(8, 256)
class Unmoved(torch.nn.Linear):
    def _apply(self, *_, **__):
        return torch.empty(1 << 50)
class Hungry(torch.optim.SGD):
    def step(self, closure=None):
        return torch.empty(1 << 50)
def hungry(model, inner):
    return Hungry(model.parameters())
"""
OWN_FUNCTIONS = tuple(f"users_own:{name}" for name in ("fails", "huge", "late", "unmoved", "hungry"))


def test_what_cannot_be_trained_here_is_one_sentence(
    coordinator: InThread, text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model function that raises, memory that does not suffice, and a state directory that is none were a traceback,
    or `[Errno 17]`, and worth another try."""
    (tmp_path / "users_own.py").write_text(USERS_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    for function in ("fails", "huge", "late", "unmoved"):
        spec = RUN.format(source=text, rounds=2).replace('preset = "tiny"', f'factory = "users_own:{function}"')
        coordinator.create_run(spec.replace('"text"', f'"{function}"', 1))
    coordinator.create_run(RUN.format(source=text, rounds=2))
    spec = RUN.format(source=text, rounds=2).replace('"text"', '"hungry"', 1)
    spec = spec.replace("learning_rate = 3e-3", 'optimizer = "users_own:hungry"')
    coordinator.create_run(spec)
    (tmp_path / "file").touch()

    def refusal(run: str = "text", state: Path = tmp_path / "state", **changes: Any) -> str:
        caplog.clear()
        settings = worker_settings(coordinator, run, state, allow_code=OWN_FUNCTIONS, **changes)
        assert run_worker(settings) == Exit.REFUSED
        line = caplog.records[-1].getMessage()
        assert "Errno" not in line
        assert caplog.records[-1].exc_info is None
        return line

    own = tmp_path / "users_own.py"
    assert refusal(run="fails") == f"model.factory = 'users_own:fails' raised KeyError: 'weights' ({own}, line 4)"
    assert "can't allocate memory" in refusal(run="huge")
    assert refusal(run="late").startswith("not even one sequence fits into memory: DefaultCPUAllocator")
    assert refusal(run="hungry").startswith("the inner optimizer's step does not fit into memory: DefaultCPUAllo")
    assert refusal(run="unmoved").startswith("not enough memory: DefaultCPUAllocator: can't allocate memory")
    for directory in (tmp_path / "file", tmp_path / "file/below"):
        line = refusal(state=directory)
        why = f"{tmp_path}/file is not a directory"
        assert line == f"--state-dir {directory} cannot hold this worker's state: {why}; choose another directory"
    log = tmp_path / "missing/steps.jsonl"
    assert refusal(step_log=log) == f"OUTERSTEP_STEP_LOG={log}: No such file or directory"


def of_tokens(text: Path, tokenizer: Path, *, rounds: int, vocabulary: int = 320) -> str:
    shape = (
        f'[model.config]\nmodel_type = "llama"\nvocab_size = {vocabulary}\nhidden_size = 32\nintermediate_size = 64\n'
        "num_hidden_layers = 1\nnum_attention_heads = 2\n"
    )
    spec = RUN.format(source=text, rounds=rounds).replace('[model]\npreset = "tiny"\n', shape)
    return spec.replace("holdout = 0.1", f'holdout = 0.1\ntokenizer = "{tokenizer}"')


def test_a_run_of_tokens(
    coordinator: InThread,
    text: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker tokenises its text before it joins; and then whoever has another tokenizer is refused by its name."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    caplog.set_level(logging.INFO)
    coordinator.create_run(of_tokens(text, tokenizer, rounds=2))
    assert run_worker(settings(coordinator, tmp_path)) == Exit.DONE
    assert "38 rows are never trained" in caplog.text
    with coordinator.client() as http:
        rounds = http.get("/v1/runs/text/rounds").json()["items"]
    assert rounds[-1]["held_out_loss"] == pytest.approx(5.77, abs=0.2), "the logarithm of 320"

    coordinator.create_run(of_tokens(text, tokenizer, rounds=2, vocabulary=256).replace('"text"', '"small"', 1))
    assert run_worker(settings(coordinator, tmp_path, run="small")) == Exit.REFUSED
    assert "vocab_size = 256 is too small" in caplog.text

    coordinator.create_run(of_tokens(text, tokenizer, rounds=2).replace('"text"', '"two"', 1))
    with open_http(coordinator.url) as http:
        client = Client(http, "two", coordinator.token(Scope.WORKER))
        spec = client.run_detail().spec
        tensors = tensor_specs(build_model(spec, torch.device("cpu")))
        client.join("first", JoinRequest(tensors=tensors, data=open_training_set(spec).summary))
    write_tokenizer(tokenizer, "other words, and other merges")
    assert run_worker(settings(coordinator, tmp_path, run="two")) == Exit.REFUSED
    assert f"training set was made by the tokenizer {tokenizer} (BLAKE3 " in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"url": "example.org"},
        {"url": "ftp://x"},
        {"name": "Not A Name"},
        {"gpus": 0},
        {"token": ""},
        {"micro_batch": "some"},
        {"micro_batch": -1},
        {"precision": "fp8"},
    ],
)
def test_wrong_settings(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        WorkerSettings(**{"url": "http://c", "run": "r", "token": "t", **changes})


# --- outerstep worker --gpus N, by torchrun ------------------------------------------------------------------------


def losses(running: InThread, directory: Path, name: str, *options: str) -> list[float]:
    """The loss of every inner step of a worker that trains the run `name` to its end."""
    log, state = directory / f"{name}.jsonl", directory / name
    command = [sys.executable, "-m", "outerstep", "worker", running.url, "--run", name, "--device", "cpu", *options]
    command += ["--data-root", str(directory)]
    variables = {"OUTERSTEP_TOKEN": running.token(Scope.WORKER), "OUTERSTEP_STEP_LOG": str(log), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--name", "a", "--state-dir", str(state)],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert shown(running, name).state is RunState.FINISHED
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


@pytest.mark.nightly
def test_replicas_and_shards_train_as_one_process_does(coordinator: InThread, tmp_path: Path) -> None:
    """On the same units, the batch is shared, in micro-batches as well, and the gradient is that of all of it."""
    text = write_chapters(tmp_path / "text", chapters=4, repeats=20)
    ways = {
        "one": [],
        "ddp": ["--gpus", "2", "--parallel", "ddp", "--micro-batch", "1"],
        "fsdp": ["--gpus", "2", "--parallel", "fsdp", "--micro-batch", "1", "--activation-checkpointing"],
    }
    found = {}
    for name, options in ways.items():
        coordinator.create_run(tiny_spec(name, text, seed=0, rounds=3, min_workers=1))
        found[name] = losses(coordinator, tmp_path, name, *options)
    assert len(found["one"]) == 15
    assert found["one"][-1] < found["one"][0] - 0.5
    for name in ("ddp", "fsdp"):
        assert found[name] == pytest.approx(found["one"], rel=1e-3)
