"""The soak's model: small, and as slow as a GPU would be.

Each inner step takes at least SOAK_STEP_S seconds, and nearly all of that is sleep: the time that an accelerator would
compute while its host is idle. So six workers fit on two cores, and the time of an inner step does not depend on how
many of the others are dead. Each step is written into the file SOAK_STEPS, with the machine's monotonic time.
"""

import os
import time

import torch
from torch import Tensor, nn

WIDTH, CONTEXT = 96, 6


class PacedModel(nn.Module):
    """Predicts a byte from the few bytes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.mix = nn.Conv1d(WIDTH, 2 * WIDTH, CONTEXT)
        self.out = nn.Linear(2 * WIDTH, 256)
        self._step_s = float(os.environ["SOAK_STEP_S"])
        self._steps = os.open(os.environ["SOAK_STEPS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._ready_at = 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, float32[batch, length, 256], for int64[batch, length]."""
        if self.training:
            self._pace()
        padded = nn.functional.pad(self.embedding(tokens).transpose(1, 2), (CONTEXT - 1, 0))
        logits: Tensor = self.out(torch.relu(self.mix(padded)).transpose(1, 2))
        return logits

    def _pace(self) -> None:
        """A step lasts step_s from its beginning: wait for the end of the one before, then begin this one's wait."""
        self._ready_at = max(self._ready_at, time.monotonic()) + self._step_s
        time.sleep(max(self._ready_at - time.monotonic(), 0.0))
        os.write(self._steps, f"{time.monotonic():.3f}\n".encode())


def build() -> nn.Module:
    return PacedModel()
