"""What two models of equal loss may differ in: skills, and how they go on learning.

DiLoCo's models of equal loss had worse skills (arXiv 2511.13761). If their representations had drifted, they would also
learn other text more slowly than synchronous models, or forget more of the old one.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.convergence.completion import completion, held_out
from benchmarks.frontier.training import Training
from worker.data.open_training_set import TextData

OTHER_TEXT = Path(torch.__file__).parent / "include" / "c10"  # 1.8 MB of C++, installed with torch
CONTINUED_STEPS = 300


@dataclass(frozen=True)
class BeyondLoss:
    """lines    share of held-out lines of Python completed exactly
    by_kind  bits per byte of held-out Python, by kind
    other    held-out loss on C++ in nats per byte, before training on it
    learned  the same after CONTINUED_STEPS synchronous steps on C++
    kept     the loss on Python then
    """

    lines: float
    by_kind: dict[str, float]
    other: float
    learned: float
    kept: float


def beyond_loss(of: Training, point: Tensor, batches: int) -> BeyondLoss:
    """Measure the model at `point`, float32[n], and continue from there with `batches` work units in each step."""
    of.set_model(point)
    done = completion(of.model, *held_out(of.spec), of.spec.data.sequence_length)
    by_kind = {kind: round(bits, 4) for kind, bits in done.by_kind.items()}

    sync = of.spec.sync.model_copy(update={"inner_steps": CONTINUED_STEPS, "rounds": 1})
    source = of.spec.data.model_copy(update={"source": str(OTHER_TEXT)})
    spec = of.spec.model_copy(update={"sync": sync, "data": source})
    after = Training(spec, 1, of.device)
    after.start_from(point)
    other = after.loss(point)
    after.train_synchronously(CONTINUED_STEPS, batches)
    learned = after.loss(after.theta)
    kept = after.loss(after.theta, data=TextData(of.spec))
    return BeyondLoss(round(done.lines, 4), by_kind, *(round(each, 4) for each in (other, learned, kept)))
