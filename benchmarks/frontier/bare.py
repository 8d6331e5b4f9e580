"""A bare loop to check the results by: synchronous training and DiLoCo in nothing but torch and transformers.

    python -m benchmarks.frontier.bare [--inner-steps 50] [--steps 3000] [--seed 0] [--results FILE]

Of our own code it uses only the reader of the text, so that work units and the held-out part are the same. The model,
its initial parameters, the inner optimizers, the schedule, the outer step and the evaluation are written here a second
time, as in the papers: eight models of transformers, `torch.optim.Muon` and AdamW for each, the mean of what they moved
in fp32, and `torch.optim.SGD` with Nesterov momentum as the outer optimizer (arXiv 2311.08105, algorithm 1). Without
--inner-steps, one model trains synchronously on the batches of all eight. The held-out loss, nats per byte, is printed
and appended to docs/bare.jsonl, which docs/convergence.md compares with the other implementations.
"""

import argparse
import copy
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.convergence.results import append, read_fields
from benchmarks.convergence.rows import Row
from protocol.spec.run import parse_spec
from worker.data.open_training_set import TextData

RESULTS = Path(__file__).parents[2] / "docs" / "bare.jsonl"
WORKERS = 8
WARM_UP = 100
RATE, LEAST = 8e-3, 0.1  # the peak learning rate, and the share of it at the end
OUTER_RATE, OUTER_MOMENTUM = 1.0, 0.8
HELD_OUT = 65_536  # bytes


@dataclass(frozen=True)
class Result:
    """The loss of the last state. `inner_steps`: H; None: synchronous training."""

    inner_steps: int | None
    steps: int
    seed: int
    loss: float
    seconds: float


class Worker:
    """A model with its inner optimizers."""

    def __init__(self, model: LlamaForCausalLM, steps: int) -> None:
        self.model, self._steps = model, steps
        hidden = [each for name, each in model.named_parameters() if ".layers." in name and each.ndim == 2]
        others = [each for name, each in model.named_parameters() if ".layers." not in name or each.ndim != 2]
        muon = torch.optim.Muon(
            hidden, lr=RATE, weight_decay=0.1, momentum=0.9, nesterov=False, adjust_lr_fn="match_rms_adamw"
        )
        self._optimizers = [muon, torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)]

    def step(self, step: int, batch: torch.Tensor) -> None:
        """Take inner step `step` on int64[sequences, length + 1]."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = RATE * _height(step, self._steps)
        mean_loss(self.model, batch).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()


def _height(step: int, steps: int) -> float:
    """Return the learning rate as a share of its peak: linear warmup, then half a cosine."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    part = (step - WARM_UP) / (steps - WARM_UP)
    return LEAST + (1 - LEAST) * (1 + math.cos(math.pi * part)) / 2


def initial_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.08,
    )
    model = LlamaForCausalLM(config)
    nn.init.normal_(model.model.embed_tokens.weight, std=1.0)
    return model


def mean_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train_synchronously(model: LlamaForCausalLM, data: TextData, steps: int) -> None:
    worker = Worker(model, steps)
    for step in range(steps):
        worker.step(step, torch.cat([data.unit(WORKERS * step + rank) for rank in range(WORKERS)]))


def train_by_diloco(model: LlamaForCausalLM, data: TextData, steps: int, inner_steps: int) -> None:
    """Train with DiLoCo, in rounds of `inner_steps`, and give `model` the parameters that Nesterov's method has
    reached: those of the outer optimizer look one step of its momentum ahead."""
    workers = [Worker(copy.deepcopy(model), steps) for _ in range(WORKERS)]
    outer = torch.optim.SGD(model.parameters(), lr=OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    for first in range(0, steps, inner_steps):
        for rank, worker in enumerate(workers):
            worker.model.load_state_dict(model.state_dict())
            for step in range(first, first + inner_steps):
                worker.step(step, data.unit(WORKERS * step + rank))
        with torch.no_grad():
            for own, *locals_ in zip(model.parameters(), *(each.model.parameters() for each in workers), strict=True):
                own.grad = own - torch.stack(locals_).mean(0)
        outer.step()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(outer.state[each]["momentum_buffer"], alpha=OUTER_RATE * OUTER_MOMENTUM)


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, data: TextData) -> float:
    batches = list(data.held_out_batches(HELD_OUT))
    losses = [float(mean_loss(model, batch)) * batch[:, 1:].numel() for batch in batches]
    return sum(losses) / sum(batch[:, 1:].numel() for batch in batches)


def measure(inner_steps: int | None, steps: int, seed: int) -> Result:
    torch.set_num_threads(1)
    began = time.monotonic()
    data, model = TextData(parse_spec(Row().spec(steps, seed))), initial_model(seed)
    if inner_steps is None:
        train_synchronously(model, data, steps)
    else:
        train_by_diloco(model, data, steps, inner_steps)
    return Result(inner_steps, steps, seed, round(evaluate(model, data), 4), round(time.monotonic() - began, 1))


def read(path: Path) -> list[Result]:
    """Return the results in `path`; none if it does not exist."""
    return [Result(**fields) for fields in read_fields(path)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frontier.bare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--inner-steps", type=int, help="H, of DiLoCo; omitted: synchronous training")
    parser.add_argument("--steps", type=int, default=3000, help="whole rounds of H")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    if (h := arguments.inner_steps) is not None and (h < 1 or arguments.steps % h):
        parser.error(f"{arguments.steps} steps are no whole rounds of {arguments.inner_steps}")
    result = measure(arguments.inner_steps, arguments.steps, arguments.seed)
    append(arguments.results, result)
    print(json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
