"""The models here are tiny: more threads than one only cost time."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from harness import coordinator as in_thread
from harness.coordinator import InThread
from tests.support.text import write_chapters
from tests.support.waiting import PATIENCE_S
from tests.worker import toy
from tests.worker.toy import Joined, MakeToy, Toy
from worker import process
from worker.line import connections, transfer
from worker.link import client


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Text is prepared in a directory of the test, by one process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("worker.data.tokens.preparing.cores", lambda: 1)
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that leaves, or gives up a fragment, waits until its long polls have ended: at most one second here."""
    monkeypatch.setattr(client, "LONG_POLL_S", 1)


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a worker that leaves hands in its work, and no connection counts as dead."""
    monkeypatch.setattr(connections, "SILENT_S", PATIENCE_S)
    monkeypatch.setattr(transfer, "LEAVING_TIMEOUT", httpx.Timeout(PATIENCE_S))
    monkeypatch.setattr(process, "HAND_IN_S", PATIENCE_S)
    monkeypatch.setattr(process, "LEAVE_WITHIN_S", PATIENCE_S)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_chapters(tmp_path / "text")


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[InThread]:
    with in_thread.coordinator_thread(tmp_path / "coordinator") as running:
        yield running


@pytest.fixture
def toy_run(tmp_path: Path) -> Iterator[MakeToy]:
    """Creates the toy run, of a spec other than the toy's own if that is given, on a coordinator that ends with the test."""
    with ExitStack() as ends:

        def create(text: str | None = None, **options: Any) -> Toy:
            coordinator = ends.enter_context(toy.coordinator_thread(tmp_path / "coordinator", **options))
            return Toy(coordinator, text or toy.spec(), tmp_path)

        yield create


@pytest.fixture
def joined(toy_run: MakeToy) -> Iterator[Joined]:
    """A worker of the toy run, its model and its optimizer."""
    run, (model, optimizer) = toy_run(toy.spec(rounds=1)), toy.model_and_optimizer()
    with run.connect(model, optimizer) as diloco:
        yield diloco, model, optimizer
