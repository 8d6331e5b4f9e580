"""Real runs of `outerstep worker` in this process: of models of a few thousand parameters, on a little text."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.coordinator import InThread
from outerstep.common.exit_codes import Exit
from protocol.messages import JoinRequest, RunDetail, Scope
from tests.support.text import write_chapters
from tests.support.workers import worker_settings
from worker.agent import run_worker
from worker.data.open_training_set import TextData
from worker.export import export, load_checkpoint
from worker.link.client import Client, open_http
from worker.models.building import build_model
from worker.state.parameters import frozen_summary, tensor_specs


def create(
    coordinator: InThread,
    directory: Path,
    name: str,
    model: str,
    *,
    rounds: int = 2,
    min_workers: int = 1,
    fragment_elements: int = 70_000,
    data: str = "",
    keep: int = 10,
) -> None:
    """Create a run of `model` on a little text in `directory`."""
    text = write_chapters(directory / "text", chapters=4, repeats=20)
    coordinator.create_run(
        f'name = "{name}"\nmodel = {{{model}}}\n[data]\nsource = "{text}"\nsequence_length = 16\n{data}\n[inner]\nbatch_size = 2\n'
        f'warmup_steps = 0\n[sync]\nwait = "always"\nrounds = {rounds}\ninner_steps = 2\n'
        f"fragment_elements = {fragment_elements}\n"
        f"[checkpoints]\nevery_rounds = 1\nkeep = {keep}\n[members]\nmin_workers = {min_workers}\n"
    )


def work(coordinator: InThread, directory: Path, run: str, name: str = "a") -> Exit:
    """Be a worker of the run until it ends."""
    return run_worker(worker_settings(coordinator, run, directory / "state" / run / name, name=name))


def shown(coordinator: InThread, run: str) -> RunDetail:
    with coordinator.client() as http:
        return RunDetail.model_validate(http.get(f"/v1/runs/{run}").json())


def state(coordinator: InThread, run: str, state_round: int | None = None) -> dict[str, torch.Tensor]:
    """The parameters of a checkpoint."""
    with open_http(coordinator.url) as http:
        model = load_checkpoint(Client(http, run, coordinator.token(Scope.VIEWER)), state_round)
    return model.state_dict()


def join(coordinator: InThread, run: str, name: str = "first") -> None:
    """Join the run as a worker that fixes its model, and does nothing."""
    with open_http(coordinator.url) as http:
        client = Client(http, run, coordinator.token(Scope.WORKER))
        spec = client.run_detail().spec
        model = build_model(spec, torch.device("cpu"))
        data = TextData(spec).summary
        client.join(name, JoinRequest(tensors=tensor_specs(model), data=data, frozen=frozen_summary(model)))


def train(coordinator: InThread, directory: Path, run: str, model: str, **options: Any) -> None:
    """Create a run, and be its worker until it is finished."""
    create(coordinator, directory, run, model, **options)
    assert work(coordinator, directory, run) == Exit.DONE


def exported(coordinator: InThread, run: str, directory: Path, **options: Any) -> nn.Module:
    """Export the run's latest checkpoint, as whoever may view it."""
    with open_http(coordinator.url) as http:
        return export(Client(http, run, coordinator.token(Scope.VIEWER)), directory, **options)
