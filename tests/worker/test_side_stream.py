"""Work beside the training: it begins when what it needs is done, and nobody sees it half done."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from worker.tuning.side_stream import SideStream

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Recorder:
    """What is asked of streams that only note it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self._current = "training"
        self.in_torch = SimpleNamespace(
            Stream=lambda device: f"side of {device}",
            Event=lambda: Event(self.calls),
            stream=self._on,
            current_stream=lambda device: self._current,
        )

    @contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def kernel(self) -> None:
        self.calls.append(("kernel", self._current))


class Event:
    def __init__(self, calls: list[tuple[str, ...]]) -> None:
        self._calls = calls

    def record(self, stream: str) -> None:
        self._calls.append(("record", stream))

    def wait(self, stream: str) -> None:
        self._calls.append(("wait", stream))

    def synchronize(self) -> None:
        self._calls.append(("synchronize",))


@pytest.mark.parametrize("fails", [False, True])
def test_it_waits_on_the_device_for_what_it_needs_and_on_the_host_for_its_end(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    streams = Recorder()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams.in_torch)
    side = SideStream(torch.device("cuda:1"))
    streams.kernel()
    gathered = side.mark()
    try:
        with side.beside(gathered):
            streams.kernel()
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert fails
    streams.kernel()
    assert streams.calls == [
        ("kernel", "training"),
        ("record", "training"),
        ("wait", "side of cuda:1"),
        ("kernel", "side of cuda:1"),
        ("record", "side of cuda:1"),
        ("synchronize",),
        ("kernel", "training"),
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_what_it_copies_is_what_was_there_when_it_was_marked(device: str) -> None:
    side = SideStream(torch.device(device))
    values = torch.zeros(1 << 20, device=device)
    for number in range(1, 20):
        values += 1
        taken = values.clone()
        marked = side.mark()
        with side.beside(marked):
            copied = taken.cpu()
        assert bool((copied == number).all())
