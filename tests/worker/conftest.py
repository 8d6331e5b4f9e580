"""The models here are tiny: more threads than one only cost time."""

from pathlib import Path

import httpx
import pytest
import torch

from tests.support.waiting import PATIENCE_S
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
