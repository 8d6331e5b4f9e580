"""Real workers with a real coordinator, each made as slow as its row says: an inner step of speed s takes at least
STEP_S / s seconds, which a worker mostly sleeps, as it would wait for its GPU. So eight fit on two cores.

  auto             sync.inner_steps = "auto": each does what it can in a round's time, the slowest a single step
  H for everybody  sync.wait = "never": a slow box contributes when it has done H inner steps, many rounds later
"""

import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.unequal.loop import (
    EQUAL,
    EVALUATION_TOKENS,
    FASTEST,
    LEARNING_RATE,
    MOMENTUM,
    OUTER_LEARNING_RATE,
    SPEEDS,
    WARMUP,
    H,
)
from harness.coordinator import CoordinatorProcess
from harness.worker_processes import WorkerProcesses
from protocol.spec.model import PRESETS

STEP_S = 0.15
PAUSE_S = 0.1
STEP_VARIABLE = "UNEQUAL_STEP_S"
FACTORY = "benchmarks.unequal.product:build"
AUTO = f'inner_steps = "auto"\nround_s = {STEP_S * H}\nnominal_inner_steps = {H}\nmin_inner_steps = 1\nwait = "never"'
FIXED = f'inner_steps = {H}\nwait = "never"'
SPEC = f"""
name = "unequal"
seed = {{seed}}
[model]
factory = "{FACTORY}"
[data]
source = "python-stdlib"
sequence_length = 64
[inner]
optimizer = "adamw"
batch_size = 8
learning_rate = {LEARNING_RATE}
warmup_steps = {WARMUP}
[outer]
learning_rate = {OUTER_LEARNING_RATE}
momentum = {MOMENTUM}
[sync]
rounds = {{rounds}}
fragment_elements = 50_000
{{sync}}
[members]
min_workers = {{workers}}
grace_factor = 0.1
grace_min_s = 0.5
[evaluation]
every_rounds = 1_000
max_tokens = {EVALUATION_TOKENS}
"""
ROWS = {
    "equal speeds": (EQUAL, AUTO),
    "without the slowest": (FASTEST, AUTO),
    "auto": (SPEEDS, AUTO),
    "H for everybody": (SPEEDS, FIXED),
}


@dataclass(frozen=True)
class Measured:
    """`units`: inner steps that are in the model. `contributions`: by worker, the fastest first."""

    row: str
    seed: int
    seconds: float
    units: int
    loss: float
    contributions: list[int]


class Paced(nn.Module):
    """A model of the shape of the preset `tiny`, as slow as STEP_VARIABLE says."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(**PRESETS["tiny"], max_position_embeddings=64, bos_token_id=None, eos_token_id=None)
        self.model = LlamaForCausalLM(config)
        self._step_s, self._ready_at = float(os.environ[STEP_VARIABLE]), 0.0

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, float32[batch, length, 256], for int64[batch, length]."""
        if self.training:
            self._ready_at = max(self._ready_at, time.monotonic()) + self._step_s
            time.sleep(max(self._ready_at - time.monotonic(), 0.0))
        logits: Tensor = self.model(tokens).logits
        return logits


def build() -> nn.Module:
    return Paced()


def measure(row: str, rounds: int, seed: int) -> Measured:
    """Train one run to its end. Raises RuntimeError if a worker does not end well."""
    speeds, sync = ROWS[row]
    with tempfile.TemporaryDirectory(prefix="outerstep-") as temporary, ExitStack() as stack:
        directory = Path(temporary)
        coordinator = CoordinatorProcess(directory / "data")
        stack.callback(coordinator.stop)
        running = coordinator.start()
        least = sum(speed >= 0.5 for speed in speeds)
        running.create_run(SPEC.format(seed=seed, rounds=rounds, sync=sync, workers=least))
        workers = stack.enter_context(WorkerProcesses(running, "unequal", directory))
        names = [f"box-{index}" for index in range(len(speeds))]
        for name, speed in zip(names, speeds, strict=True):
            paced = {STEP_VARIABLE: str(STEP_S / speed)}
            workers.start(name, "--threads", "1", "--allow-factory", FACTORY, environment=paced)
        while workers.are_training and workers.detail().round == 0:  # they are still loading
            time.sleep(PAUSE_S)
        began = time.monotonic()
        while workers.are_training:
            time.sleep(PAUSE_S)
        seconds = time.monotonic() - began
        workers.check()
        info = workers.detail()
        assert info.held_out_loss is not None
        with running.client() as http:
            found = {each["name"]: each for each in http.get("/v1/runs/unequal/workers").json()["items"]}
        contributions = [found[name]["contributions"] for name in names]
        return Measured(row, seed, seconds, info.tokens // info.spec.unit_tokens, info.held_out_loss, contributions)
