"""The worker's log of inner steps: one JSON object per line, appended to a file.

Losses stay on their device until several lines are written together, so that no step waits for them. A full disk costs
lines, never training.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

GROUP_STEPS = 100
GROUP_S = 5.0

log = logging.getLogger(__name__)


class StepLog:
    """Appends lines to the file at `path`, in groups of at most GROUP_STEPS inner steps, GROUP_S seconds, and one
    round.

    Use as a context manager: entering raises OSError if the file cannot be appended to. `clock` gives monotonic
    seconds, `now` seconds since 1970.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        self._path, self._clock, self._now = path, clock, now
        self._lines: list[dict[str, Any]] = []
        self._losses: list[Tensor] = []
        self._began = self._last = clock()
        self._lost = 0

    def __enter__(self) -> Self:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":  # a line cut off by a kill
            self._append(b"\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write()
        os.close(self._file)

    def begin_round(self) -> None:
        """Note the start of a round's inner steps: the time between two rounds belongs to no step."""
        self._write()
        self._began = self._last = self._clock()

    def step(self, loss: Tensor, tokens: int, **facts: object) -> None:
        """Note one inner step: its loss, a scalar on any device, its tokens, and the other entries of its line."""
        self._last = self._clock()
        self._lines.append({"at": round(self._now(), 3), **facts, "tokens": tokens})
        self._losses.append(loss.detach())
        if len(self._lines) >= GROUP_STEPS or self._last - self._began >= GROUP_S:
            self._write()

    def _write(self) -> None:
        if not self._lines:
            return
        seconds = max(self._last - self._began, 1e-9)
        speed = round(sum(line["tokens"] for line in self._lines) / seconds, 1)
        losses: list[float] = torch.stack(self._losses).float().tolist()
        text = b"".join(
            _line(line | {"loss": loss, "tokens_per_second": speed})
            for line, loss in zip(self._lines, losses, strict=True)
        )
        self._lines, self._losses, self._began = [], [], self._last
        self._append(text)

    def _append(self, text: bytes) -> None:
        """Append all of `text` or nothing."""
        try:
            size = os.fstat(self._file).st_size
            written = os.write(self._file, text)
            if written < len(text):
                os.ftruncate(self._file, size)
                raise OSError(f"{written} of {len(text)} bytes written")
        except OSError as error:
            if not self._lost:
                log.warning("cannot write the step log %s (%s); the training continues without it", self._path, error)
            self._lost += text.count(b"\n")
        else:
            if self._lost:
                log.warning("the step log %s can be written again; %d lines are missing", self._path, self._lost)
            self._lost = 0


def _line(facts: dict[str, Any]) -> bytes:
    """Return one line. Numbers that are not finite, which JSON lacks, become null."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in facts.items()
    }
    return json.dumps(finite).encode() + b"\n"
