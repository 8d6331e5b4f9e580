"""Work on a device beside the training: on a stream of its own, so that the inner steps' kernels do not wait for it.

Threads alone do not do that: all of them queue what they do on the device's default stream, behind the inner steps that
are queued there already, and before those that come.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """One more stream of `device`. Thread-safe. Where a device has none to choose from (CPU, Metal), all of it is
    without effect."""

    def __init__(self, device: torch.device) -> None:
        has_streams = device.type not in ("cpu", "mps")
        self._streams: Any = torch.get_device_module(device) if has_streams else torch.cpu
        self._device = device
        self._stream = self._streams.Stream(device) if has_streams else torch.cpu.Stream()

    def mark(self) -> Any:
        """Return a mark of what the calling thread's stream was given so far, for `beside` to wait for."""
        event = self._streams.Event()
        event.record(self._streams.current_stream(self._device))
        return event

    @contextmanager
    def beside(self, after: Any = None) -> Iterator[None]:
        """Run the calling thread's block on this stream: it begins once `after` is done on the device, and ends once
        all that it did is. So what comes out of it is there for anybody, and what it read may change."""
        with self._streams.stream(self._stream):
            if after is not None:
                after.wait(self._stream)
            try:
                yield
            finally:
                done = self._streams.Event()
                done.record(self._stream)
                done.synchronize()
