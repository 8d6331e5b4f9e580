"""A toy run for tests of DiLoCo: a regression of 673 parameters in 3 fragments, 4 inner steps a round; one round
takes milliseconds.

Every worker is a real DiLoCo with a real client on a real coordinator; only the model is small.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from harness import coordinator
from harness.coordinator import InThread, SettableClock
from harness.member import waiting
from protocol.messages import RoundDetail, RunDetail, Scope, WorkerInfo
from tests.support.waiting import PATIENCE_S, wait_until
from worker.diloco import DiLoCo
from worker.link.client import Client, open_http

__all__ = ["Killed", "MakeToy", "Toy", "coordinator_thread", "make_model", "spec"]

T = TypeVar("T")

FACTORY = "tests.worker.toy:make_model"
STEPS = 4
LR = 0.01


def spec(
    *,
    rounds: int = 3,
    min_workers: int = 1,
    upload: str = "int8",
    download: str = "int8",
    momentum: float = 0.9,
    members: str = "",
    checkpoints: str = "",
    sync: str = "",
    steps: int = STEPS,
    inner: str = "",
    aggregation: str = "mean",
    source: str = "custom",
) -> str:
    """The run's spec; [inner] has an optimizer only with another source than scripts bring. With the plain mean, for many a test has a worker that trains nothing, or needs its arithmetic."""
    return f"""
name = "toy"
[model]
factory = "{FACTORY}"
[data]
source = "{source}"
[inner]
{inner}
[outer]
momentum = {momentum}
[sync]
rounds = {rounds}
inner_steps = {steps}
upload_codec = "{upload}"
download_codec = "{download}"
fragment_elements = 256
aggregation = "{aggregation}"
{waiting(sync)}
[members]
min_workers = {min_workers}
{members}
[checkpoints]
{checkpoints}
"""


def make_model() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def model_and_optimizer(kind: Any = torch.optim.AdamW, **options: Any) -> tuple[nn.Module, Optimizer]:
    """The model, and an optimizer of all its parameters."""
    model = make_model()
    return model, kind(model.parameters(), **{"lr": LR} | options)


def coordinator_thread(data_dir: Path, *arguments: Any, **options: Any) -> AbstractContextManager[InThread]:
    """A coordinator whose clock stands until a test moves it: no worker is late or lost because the machine is busy."""
    usual: dict[str, Any] = {"clock": SettableClock(), "requests_per_s": 1e6}
    return coordinator.coordinator_thread(data_dir, *arguments, **usual | options)


class Killed(BaseException):
    """Stands for kill −9 in a process that must live on: nothing of ours catches it."""


class MortalClient(Client):
    """A client that dies with Killed where `dies(what, round)` says so, and then says no goodbye."""

    def __init__(self, *arguments: Any, dies: Callable[[str, int], bool], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._dies = dies
        self._death = threading.Event()  # one for all copies of this client

    @property
    def dead(self) -> bool:
        return self._death.is_set()

    def die(self) -> None:
        """As if killed between two requests."""
        self._death.set()
        raise Killed

    def reach(self, what: str, round_number: int) -> None:
        if self.dead or self._dies(what, round_number):
            self._death.set()
            raise Killed(what)

    def contribute(self, member_token, header, frames, **options):
        self.reach("before upload", header.round)
        super().contribute(member_token, header, frames, **options)
        self.reach("after upload", header.round)

    def delta(self, round_number, p, limit_bytes, member_token=None, *, early=bool, **options):
        wait_until(lambda: not early())  # "before download" would come at any time
        self.reach("before download", round_number)
        payload = super().delta(round_number, p, limit_bytes, member_token, early=early, **options)
        self.reach("after download", round_number)
        return payload

    def leave(self, *arguments):
        if not self.dead:
            super().leave(*arguments)


class Toy:
    """The toy run on a coordinator: starts workers on it, in this thread or in others."""

    def __init__(self, coordinator: InThread, text: str, state_dirs: Path) -> None:
        coordinator.create_run(text)
        self.coordinator = coordinator
        self.token = coordinator.token(Scope.WORKER)
        self.state_dirs = state_dirs

    def get(self, path: str = "") -> Any:
        """The coordinator's answer to a question about the run."""
        with self.coordinator.client() as http:
            return http.get(f"/v1/runs/toy{path}").raise_for_status().json()

    def info(self) -> RunDetail:
        return RunDetail.model_validate(self.get())

    def told(self, name: str) -> WorkerInfo:
        """What the coordinator says of a worker."""
        return WorkerInfo.model_validate(self.get(f"/workers/{name}"))

    def round(self, number: int) -> RoundDetail:
        return RoundDetail.model_validate(self.get(f"/rounds/{number}"))

    def events(self) -> list[Any]:
        return list(self.get("/events?limit=1000")["items"])

    def stop(self) -> None:
        """Stop the run, as an operator does."""
        with self.coordinator.client() as http:
            http.patch("/v1/runs/toy", json={"state": "stopped"}).raise_for_status()

    def final(self) -> RunDetail:
        """The run once it is finished and the coordinator has taken the last outer step itself."""
        wait_until(lambda: self.info().state_digest is not None)
        return self.info()

    def connect(
        self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *, name: str = "a", **options: Any
    ) -> DiLoCo:
        """A worker, as a script of somebody's own has it; without a state directory, unless `options` name one."""
        where = {"url": self.coordinator.url, "run": "toy", "token": self.token}
        return DiLoCo.connect(model, optimizer, **where, name=name, **{"state_dir": None} | options)

    def worker(
        self,
        name: str,
        *,
        client_class: Callable[..., Client] = Client,
        state_dir: Path | None = None,
        on_step: Callable[[DiLoCo], None] = lambda diloco: None,
        lr: Callable[[DiLoCo], float] = lambda diloco: LR,
        model: Callable[[], nn.Module] = make_model,
    ) -> DiLoCo:
        """Train until the run is over or `on_step` raises; the DiLoCo as it is then."""
        module = model()
        optimizer = torch.optim.AdamW(module.parameters(), lr=LR)
        with open_http(self.coordinator.url) as http:
            client = client_class(http, "toy", self.token)
            detail = client.run_detail()
            with DiLoCo(module, optimizer, client=client, run=detail, name=name, state_dir=state_dir) as diloco:
                for unit in diloco.units():
                    for group in optimizer.param_groups:
                        group["lr"] = lr(diloco)
                    step(diloco, module, optimizer, unit)
                    on_step(diloco)
        return diloco

    def workers(self, names: list[str], **options: dict[str, Any]) -> dict[str, DiLoCo]:
        """Several at once; options by name. Raises what a worker raised."""
        return at_once({name: partial(self.worker, name, **options.get(name, {})) for name in names})


MakeToy = Callable[..., Toy]  # the fixture `toy_run`
Joined = tuple[DiLoCo, nn.Module, Optimizer]  # the fixture `joined`


def at_once(workers: dict[str, Callable[[], T]]) -> dict[str, T]:
    """Run each worker on a thread of its own; what they return, by name. Raises what one raised."""
    done: dict[str, T] = {}
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            done[name] = workers[name]()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(name,)) for name in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failures, failures
    assert set(done) == set(workers), "a worker did not end"
    return done


def batch(unit: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(unit)
    x = torch.randn(16, 20, dtype=torch.float32, generator=generator)
    return x, x.sum(dim=1, keepdim=True).sin()


def step(diloco: DiLoCo, model: nn.Module, optimizer: torch.optim.Optimizer, unit: int) -> None:
    x, y = batch(unit)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    diloco.report_loss(loss)
    optimizer.step()
    optimizer.zero_grad()


def units_until(diloco: DiLoCo, inner_step: int) -> Iterator[int]:
    """The run's units before this inner step of it."""
    for unit in diloco.units():
        if diloco.global_step == inner_step:
            return
        yield unit
