"""DiLoCo in one process, written from the paper and DESIGN's arithmetic alone: what a real run is compared with.

It uses the product for three things only: the initial model, the text, and the codecs of the numpy reference, whose bytes
docs/vectors says. Every other line is its own.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3

from protocol.codecs import REFERENCE
from protocol.spec.run import RunSpec
from worker.data.open_training_set import TextData
from worker.models.building import build_model


@dataclass
class Reference:
    """The outer state, one flat fp32 vector each, after all rounds."""

    theta: torch.Tensor
    momentum: torch.Tensor

    def digests(self, bounds: list[tuple[int, int]]) -> list[str]:
        """State digests of the fragments [start, stop): BLAKE3(BLAKE3(θ) ‖ BLAKE3(u))."""
        return [
            blake3(
                blake3(self.theta[start:stop].numpy().tobytes()).digest()
                + blake3(self.momentum[start:stop].numpy().tobytes()).digest()
            ).hexdigest()
            for start, stop in bounds
        ]


def fragment_bounds(total: int, fragment_elements: int) -> list[tuple[int, int]]:
    count = math.ceil(total / fragment_elements)
    cuts = [total * p // count for p in range(count + 1)]
    return list(itertools.pairwise(cuts))


def sent(x: torch.Tensor, codec: str) -> tuple[np.ndarray, torch.Tensor]:
    """The bytes that are sent for a vector, and what they decode to."""
    raw, decoded = np.empty(REFERENCE[codec].size(len(x)), np.uint8), np.empty(len(x), np.float32)
    REFERENCE[codec].encode(x.numpy().copy(), raw)
    REFERENCE[codec].decode(raw, decoded)
    return raw, torch.from_numpy(decoded)


def run_reference(spec: RunSpec, workers: int, *, outer: str = "written out") -> Reference:
    """All rounds of `spec` with `workers` workers that are there from beginning to end.

    `outer`: "written out" for the six operations of the outer step, "torch" for torch.optim.SGD(nesterov=True).
    """
    data = TextData(spec)
    models = [build_model(spec, torch.device("cpu")) for _ in range(workers)]
    optimizers = [
        torch.optim.AdamW(
            model.parameters(),
            lr=spec.inner.learning_rate,
            betas=(spec.inner.beta1, spec.inner.beta2),
            weight_decay=spec.inner.weight_decay,
            fused=True,
        )
        for model in models
    ]
    theta = torch.cat([p.detach().flatten().clone() for p in models[0].parameters()])
    momentum = torch.zeros_like(theta)
    bounds = fragment_bounds(len(theta), spec.sync.fragment_elements)
    outer_parameter = torch.nn.Parameter(theta.clone())
    sgd = torch.optim.SGD([outer_parameter], lr=spec.outer.learning_rate, momentum=spec.outer.momentum, nesterov=True)
    steps, weight = spec.sync.inner_steps, np.float32(1 / workers)
    upload, download = REFERENCE[spec.sync.upload_codec], REFERENCE[spec.sync.download_codec]

    unsent = [torch.zeros_like(theta) for _ in models]  # what the codec has left out so far
    undelivered = torch.zeros_like(theta)  # what the codec of deltas has left out

    for round_ in range(spec.sync.rounds):
        deltas = []
        for w, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            position, begin = 0, theta - unsent[w]
            for parameter in model.parameters():
                parameter.data.copy_(begin[position : position + parameter.numel()].view_as(parameter))
                position += parameter.numel()
            for h in range(steps):
                _inner_step(
                    spec, model, optimizer, data, unit=(round_ * workers + w) * steps + h, step=round_ * steps + h
                )
            progress = begin - torch.cat([p.detach().flatten() for p in model.parameters()])
            deltas.append(progress + unsent[w])
        mean = torch.zeros_like(theta)
        for start, stop in bounds:
            for w, delta in enumerate(deltas):  # in worker-id order
                raw, decoded = sent(delta[start:stop], upload.name)
                upload.accumulate(raw, weight, mean[start:stop].numpy())
                if upload.error_feedback:
                    unsent[w][start:stop] = delta[start:stop] - decoded
            if download.error_feedback:
                mean[start:stop] += undelivered[start:stop]
            whole = mean[start:stop].clone()
            mean[start:stop] = sent(whole, download.name)[1]
            if download.error_feedback:  # kept in 8 bits
                undelivered[start:stop] = sent(whole - mean[start:stop], "int8")[1]
        if outer == "torch":
            outer_parameter.grad = mean
            sgd.step()
            theta = outer_parameter.detach().clone()
        else:
            momentum = momentum * spec.outer.momentum
            momentum = momentum + mean
            step = momentum * spec.outer.momentum
            step = step + mean
            step = step * spec.outer.learning_rate
            theta = theta - step
    return Reference(theta, momentum)


def _inner_step(
    spec: RunSpec, model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: TextData, *, unit: int, step: int
) -> None:
    """One AdamW step: linear warmup then cosine, gradients clipped to a global norm."""
    inner, total = spec.inner, spec.sync.rounds * spec.sync.inner_steps
    if step < inner.warmup_steps:
        rate = inner.learning_rate * (step + 1) / inner.warmup_steps
    else:
        cosine = 0.5 * (1 + math.cos(math.pi * (step - inner.warmup_steps) / (total - inner.warmup_steps)))
        rate = inner.learning_rate * (inner.final_fraction + (1 - inner.final_fraction) * cosine)
    for group in optimizer.param_groups:
        group["lr"] = rate
    batch = data.unit(unit)
    logits = model(batch[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    assert inner.clip_norm != "none"
    torch.nn.utils.clip_grad_norm_(model.parameters(), inner.clip_norm)
    optimizer.step()
