"""DiLoCo in one process, written from the paper and DESIGN's arithmetic alone: what a real run is compared with.

It uses the worker package for two things only, the initial model and the text; every other line is its own.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3

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


WITH_FEEDBACK = {"2bit", "ternary"}
MOST = {"int8": 127, "int4": 7}


def to_bf16(x: np.float32, up: bool) -> np.float32:
    """A positive number rounded to 8 significant bits, at least 2^-126."""
    bits = (int(x.view(np.uint32)) + (0xFFFF if up else 0)) >> 16 << 16
    return np.float32(max(np.uint32(bits).view(np.float32), np.float32(2.0**-126)))


def tree_sum(x: np.ndarray) -> np.float32:
    """Of 2^k numbers: element by element the first half plus the second, and so on."""
    return np.float32(x[0]) if len(x) == 1 else tree_sum(x[: len(x) // 2] + x[len(x) // 2 :])


def quantise(x: torch.Tensor, codec: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (as fp32) and each element's scale, block by block."""
    codes, scales = torch.empty_like(x), torch.empty_like(x)
    size = 64 if codec == "ternary" else 256
    for start in range(0, len(x), size):
        block = x[start : start + size].numpy()
        if codec in WITH_FEEDBACK:
            squares = np.zeros(size, np.float32)
            squares[: len(block)] = block * block
            rms = np.sqrt(tree_sum(squares) / np.float32(len(block)))
        if codec == "ternary":
            scale = to_bf16(rms * np.float32(1.5), up=False)
            code = np.sign(block) * (np.abs(block) * np.float32(1.5) >= scale)
        elif codec == "2bit":
            scale = to_bf16(rms * np.float32(1 / 64), up=False)
            code = np.where(np.abs(block) >= scale * np.float32(63), 97, 29) * np.where(block < 0, -1, 1)
        else:
            scale = to_bf16(np.float32(np.abs(block).max()) / np.float32(MOST[codec]), up=True)
            code = np.rint(block * (np.float32(1) / scale))
        codes[start : start + size] = torch.from_numpy(code)
        scales[start : start + size] = float(scale)
    return codes, scales


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
                if spec.sync.upload_codec != "fp32":
                    codes, scales = quantise(delta[start:stop], spec.sync.upload_codec)
                    mean[start:stop] = mean[start:stop] + codes * (scales * float(weight))
                    if spec.sync.upload_codec in WITH_FEEDBACK:
                        unsent[w][start:stop] = delta[start:stop] - codes * scales
                else:
                    mean[start:stop] = mean[start:stop] + delta[start:stop] * float(weight)
            if spec.sync.download_codec != "fp32":
                if spec.sync.download_codec in WITH_FEEDBACK:
                    mean[start:stop] = mean[start:stop] + undelivered[start:stop]
                codes, scales = quantise(mean[start:stop], spec.sync.download_codec)
                left = mean[start:stop] - codes * scales
                mean[start:stop] = codes * scales
                if spec.sync.download_codec in WITH_FEEDBACK:  # kept in 8 bits
                    codes, scales = quantise(left, "int8")
                    undelivered[start:stop] = codes * scales
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
