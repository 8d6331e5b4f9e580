"""The training loop's side of the rounds: the model, its inner optimizers, and how far they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from protocol.messages import EvaluationReport
from worker.accounts.progress import Progress
from worker.privacy.protecting import Protection
from worker.ranks import ALONE, Ranks
from worker.rounds.inner_steps import InnerSteps
from worker.state.fragments import Fragments
from worker.state.own_points import OwnPoints
from worker.state.writes import Writes


@dataclass(frozen=True)
class Training:
    """What one worker trains. `evaluate` measures the held-out loss of the model as it is; None where none is.
    `initial` puts state 0 into the model; None where it holds that. `scaler` scales the loss, for fp16; None where
    nothing does. `writes`: watches that the optimizers alone write to the parameters. `ranks`: the processes that
    train it together. `points`: what the optimizers keep beside it. `protection`: what is done to contributions before
    they leave; None where the run has no [privacy]."""

    fragments: Fragments
    optimizers: Sequence[torch.optim.Optimizer]
    steps: InnerSteps
    progress: Progress
    evaluate: Callable[[], EvaluationReport] | None
    initial: Callable[[], None] | None
    scaler: torch.amp.GradScaler | None
    writes: Writes
    ranks: Ranks = ALONE
    points: OwnPoints = field(default_factory=OwnPoints)
    protection: Protection | None = None

    def scaler_state(self) -> dict[str, Any] | None:
        """Return the scale of the loss and when it grows; None without a scaler."""
        return None if self.scaler is None else self.scaler.state_dict()
