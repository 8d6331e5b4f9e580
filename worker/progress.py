"""A worker's own measurements: what the heartbeat reports and the log line of each round says."""

import logging
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from protocol.messages import Metrics
from worker.transfer import Traffic

log = logging.getLogger(__name__)


class Progress:
    """Counts and times one worker's rounds. `clock` gives seconds; written by the training loop, read by the
    heartbeat."""

    def __init__(self, traffic: Traffic, clock: Callable[[], float]) -> None:
        self._traffic, self._clock = traffic, clock
        self._lock = threading.Lock()
        self._shown = Metrics(phase="join")
        self._losses: Tensor | None = None
        self._reports = 0
        self._started = self._trained = clock()
        self._bytes_before = (0, 0)

    def phase(self, name: str, **values: int) -> None:
        with self._lock:
            self._shown = self._shown.model_copy(update={"phase": name, **values})

    def begin_round(self, round_number: int) -> None:
        self._losses, self._reports = None, 0
        self._started = self._clock()
        self.phase("train", round=round_number, inner_step=0)

    def step(self, inner_step: int) -> None:
        self.phase("train", inner_step=inner_step)

    def report_loss(self, loss: Tensor) -> None:
        """Add one step's mean loss, nats per token. Stays on its device: no step waits for it."""
        detached = loss.detach().float()
        self._losses = detached.clone() if self._losses is None else self._losses + detached
        self._reports += 1

    def end_inner_steps(self, steps: int, tokens: int) -> float:
        """The round's mean loss; 0 where the training loop has reported none."""
        loss = 0.0 if self._losses is None else float(self._losses) / self._reports
        self._trained = self._clock()
        seconds = max(self._trained - self._started, 1e-9)
        finite = loss if torch.isfinite(torch.tensor(loss)) else None
        with self._lock:
            self._shown = self._shown.model_copy(
                update={
                    "loss": finite,
                    "tokens_per_second": tokens / seconds,
                    "inner_steps_per_second": steps / seconds,
                    "phase": "sync",
                }
            )
        return loss

    def end_round(self, round_number: int) -> None:
        """Log the round's line."""
        up, down = self._traffic.upload_bytes, self._traffic.download_bytes
        up_before, down_before = self._bytes_before
        self._bytes_before = (up, down)
        metrics = self.metrics()
        log.info(
            "round %d: loss %s, %.0f tokens/s, %.2f MB up, %.2f MB down, %.2f s compute, %.2f s sync",
            round_number,
            "unknown" if metrics.loss is None else f"{metrics.loss:.4f}",
            metrics.tokens_per_second or 0.0,
            (up - up_before) / 1e6,
            (down - down_before) / 1e6,
            self._trained - self._started,
            self._clock() - self._trained,
        )

    def metrics(self) -> Metrics:
        with self._lock:
            bytes_moved = {"upload_bytes": self._traffic.upload_bytes, "download_bytes": self._traffic.download_bytes}
            return self._shown.model_copy(update=bytes_moved)
