"""The training loop of `outerstep worker`: H inner AdamW steps per round; DiLoCo does the rest (arXiv 2311.08105)."""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.nn import functional

from protocol.messages import EvaluationReport
from protocol.spec import InnerSpec, RunSpec
from worker.data import TextData
from worker.diloco import DiLoCo
from worker.models import logits_of


def train(
    diloco: DiLoCo, model: nn.Module, optimizer: torch.optim.Optimizer, data: TextData, device: torch.device
) -> None:
    """Train until the run is over or this worker is asked to stop."""
    spec = diloco.spec
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.train()
    for unit in diloco.units():
        if diloco.inner_step == 0:
            torch.manual_seed(round_seed(spec.seed, diloco.name, diloco.round))  # a resumed round repeats bit for bit
        set_learning_rate(optimizer, learning_rate(spec, diloco.global_step) * diloco.warmup_scale)
        loss = mean_loss(model, data.unit(unit).to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, spec.inner.clip_norm)
        diloco.report_loss(loss)
        optimizer.step()  # after the last one of a round: sync, and the next round's parameters
        optimizer.zero_grad(set_to_none=True)


def build_inner_optimizer(model: nn.Module, inner: InnerSpec) -> torch.optim.AdamW:
    """Return AdamW on the trainable parameters; fused, which torch offers for CPU, CUDA and MPS."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        parameters,
        lr=inner.learning_rate,
        betas=(inner.beta1, inner.beta2),
        weight_decay=inner.weight_decay,
        fused=True,
    )


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy, nats per token, of int64[batch, length + 1]; in bf16 autocast on CUDA."""
    with _autocast(batch.device):
        logits = logits_of(model, batch[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def learning_rate(spec: RunSpec, global_step: int) -> float:
    """Return the learning rate: linear warmup, then cosine decay to `final_fraction` of the peak at the run's last
    inner step."""
    inner = spec.inner
    if global_step < inner.warmup_steps:
        return inner.learning_rate * (global_step + 1) / inner.warmup_steps
    decay_steps = max(spec.total_inner_steps - inner.warmup_steps, 1)
    step = min(global_step - inner.warmup_steps, decay_steps)
    cosine = (1 + math.cos(math.pi * step / decay_steps)) / 2
    return inner.learning_rate * (inner.final_fraction + (1 - inner.final_fraction) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def round_seed(seed: int, worker: str, round_number: int) -> int:
    """Return the seed of one worker's random numbers (dropout, for example) in one round."""
    name = f"{seed}\0{worker}\0{round_number}"
    return int.from_bytes(blake3(name.encode()).digest()[:8], "little") >> 1


@torch.no_grad()
def evaluate(model: nn.Module, data: TextData, max_tokens: int, device: torch.device) -> EvaluationReport:
    """Return the held-out loss, mean nats per token, over at most `max_tokens` held-out tokens."""
    was_training = model.training
    model.eval()
    total, tokens = 0.0, 0
    for batch in data.held_out_batches(max_tokens):
        count = batch[:, 1:].numel()
        total += float(mean_loss(model, batch.to(device))) * count
        tokens += count
    model.train(was_training)
    return EvaluationReport(loss=total / tokens, tokens=tokens)


def _autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()
