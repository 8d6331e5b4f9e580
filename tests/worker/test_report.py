"""What a worker tells of its machine is its owner's choice; what it measures of its device. With private data, each trains
on the text of its own machine, and tells no more of it than its length."""

import json
import math
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from harness.coordinator import InThread, coordinator_thread
from outerstep.cli import app
from outerstep.common.exit_codes import Exit
from protocol.messages import HostDetail, Metrics, WorkerInfo
from tests.support.specs import tiny_spec
from tests.support.text import write_chapters
from tests.support.waiting import wait_until
from tests.support.workers import worker_settings
from worker.accounts.machine import SOME, DeviceUse, host_facts, peak_flops, shared_facts, shared_metrics
from worker.agent import run_worker
from worker.data.open_training_set import TextData
from worker.inner.execution import ATTENTION, flops_per_token
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
def test_what_a_coordinator_knows(report: HostDetail, coordinator: InThread, tmp_path: Path) -> None:
    text = write_chapters(tmp_path / "text")
    coordinator.create_run(tiny_spec("r", text, seed=1, rounds=1, min_workers=1))
    assert run_worker(worker_settings(coordinator, "r", tmp_path / "state", report=report)) == Exit.DONE
    with coordinator.client() as http:
        shown = WorkerInfo.model_validate(http.get("/v1/runs/r/workers/a").json())
    assert shown.host.keys() == {"all": ALL, "some": ALL & SOME, "nothing": set()}[report]
    assert shown.metrics.loss is not None
    assert (shown.metrics.peak_memory_bytes is None) is (report != "all")
    if report != "all":
        assert platform.node() not in shown.model_dump_json()


# --- private data --------------------------------------------------------------------------------------------------


@pytest.mark.slow
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


# --- its device: model FLOPs utilisation and memory ----------------------------------------------------------------


CPU = torch.device("cpu")
LAYERS, WIDTH, MIDDLE, VOCABULARY, LENGTH = 3, 32, 48, 64, 16


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=MIDDLE,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        use_cache=False,
    )
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.train()


def test_flops_are_those_of_palm_s_formula() -> None:
    """6 N for the parameters that are multiplied with, and 12 · layers · width · length for the attention."""
    model = llama()
    multiplied = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * MIDDLE) + VOCABULARY * WIDTH
    expected = 6 * multiplied + 12 * LAYERS * WIDTH * LENGTH
    counted = flops_per_token(model, LENGTH, "fp32", CPU)
    assert counted is not None
    assert counted == pytest.approx(expected, rel=0.02)  # and the rotations' frequencies, which are a product as well
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_frozen_parameters_take_no_gradient_s_flops() -> None:
    model = llama()
    whole = flops_per_token(model, LENGTH, "fp32", CPU)
    for parameter in model.get_submodule("model.layers.0").parameters():
        parameter.requires_grad = False
    part = flops_per_token(model, LENGTH, "fp32", CPU)
    assert whole is not None
    assert part == pytest.approx(whole - 2 * (4 * WIDTH * WIDTH + 3 * WIDTH * MIDDLE), rel=1e-6)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_of_a_gpu_counts_all_heads_of_the_queries(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.13 refused models in which they share keys and values, so a worker could not start."""

    def refuse(*_: object, **__: object) -> int:
        raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")

    shape, shared = (2, 8, 16, 4), (2, 2, 16, 4)
    query, key = torch.zeros(shape, device="meta"), torch.zeros(shared, device="meta")
    scores = 2 * math.prod(shape) * 16
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention_backward")
    for each in (forward, backward):
        monkeypatch.setitem(flop_counter.flop_registry, each, refuse)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        counted = counter.flop_registry
    assert counted[forward](query, key, key, 0.0, out_val=query) == 2 * scores
    assert counted[backward](query, query, key, key, out_val=query) == 5 * scores


class Exhausted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_without_memory_for_one_sequence_nothing_is_counted() -> None:
    assert flops_per_token(Exhausted(), LENGTH, "fp32", CPU) is None


class Uncounted(Exhausted):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")


def test_what_torch_cannot_count_is_told_and_ends_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    assert flops_per_token(Uncounted(), LENGTH, "fp32", CPU) is None
    assert "so the MFU is not reported: sdpa_flop_count: query/key/value shapes" in caplog.text


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA L40S", "fp32", 91.6),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
    ],
)
def test_peaks(name: str, precision: str, tera: float) -> None:
    assert peak_flops(name, precision) == pytest.approx(tera * 1e12)


def test_without_either_figure_there_is_no_utilisation() -> None:
    assert DeviceUse(CPU, 100.0, None).utilisation(5.0) is None
    assert DeviceUse(CPU, None, 1000.0).utilisation(5.0) is None
    assert DeviceUse(CPU, 100.0, 1000.0).utilisation(5.0) == 0.5
