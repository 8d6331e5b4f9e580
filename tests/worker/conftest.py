"""The models here are tiny: more threads than one only cost time."""

import pytest
import torch

from worker.link import client


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that leaves, or gives up a fragment, waits until its long polls have ended: at most one second here."""
    monkeypatch.setattr(client, "LONG_POLL_S", 1)
