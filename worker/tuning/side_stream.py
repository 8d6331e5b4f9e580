"""A second stream of a device, for work beside the training that the inner steps' kernels do not wait for.

Threads alone do not achieve that: they all queue their work on the device's default stream, behind the inner steps that
are queued there already, and before those that follow.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """A separate stream of `device`. Thread-safe. Has no effect on a device without streams (CPU, Metal)."""

    def __init__(self, device: torch.device) -> None:
        has_streams = device.type not in ("cpu", "mps")
        self._streams: Any = torch.get_device_module(device) if has_streams else torch.cpu
        self._device = device
        self._stream = self._streams.Stream(device) if has_streams else torch.cpu.Stream()

    def mark(self) -> Any:
        """Return an event after all work that this thread's stream has so far, for `beside` to wait for."""
        event = self._streams.Event()
        event.record(self._streams.current_stream(self._device))
        return event

    @contextmanager
    def beside(self, after: Any = None) -> Iterator[None]:
        """Run the block on this stream. It starts once `after` is done on the device, and ends once its own work is
        done: then any stream may read its results, and change what it has read."""
        with self._streams.stream(self._stream):
            if after is not None:
                after.wait(self._stream)
            try:
                yield
            finally:
                done = self._streams.Event()
                done.record(self._stream)
                done.synchronize()
