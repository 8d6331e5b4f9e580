"""DiLoCo with boxes of unequal speeds in virtual time, and the plain loop of one box. The parts are the worker's own:
model, data, inner optimizer, schedule. A sync takes no time, and payloads are not encoded.

A round lasts H inner steps of the fastest box. Each other box does as many as it manages in that time; what rounding
leaves over is done in a later round. Weights are tokens.
"""

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.faults import CPU, Replica
from protocol.outer_step import outer_step, reached
from protocol.spec.run import RunSpec, parse_spec
from worker.data.open_training_set import TextData
from worker.inner.evaluation import evaluate


def alone(spec: str) -> float:
    """Return the held-out loss of a plain loop of as many inner steps as the run has, nats per token."""
    run, data = _opened(spec)
    replica = Replica(run, data)
    replica.train(range(run.total_inner_steps), 0)
    return evaluate(replica.model, data, run.evaluation.max_tokens, CPU).loss


def together(spec: str, speeds: list[float]) -> tuple[float, int]:
    """Return the held-out loss of the run's last state, nats per token, and the inner steps of all boxes."""
    run, data = _opened(spec)
    boxes, owed = [Replica(run, data) for _ in speeds], [0.0] * len(speeds)
    h = run.sync.inner_steps
    theta = _values(boxes[0])
    momentum = torch.zeros_like(theta)
    outer: dict[str, float] = {"learning_rate": run.outer.learning_rate, "beta": run.outer.momentum}
    unit = 0
    for round_ in range(run.sync.rounds):
        work: list[tuple[int, Tensor]] = []
        for index, (box, speed) in enumerate(zip(boxes, speeds, strict=True)):
            wanted = speed * h + owed[index]
            steps = int(wanted + 1e-9)
            owed[index] = wanted - steps
            if steps:
                vector_to_parameters(theta.clone(), box.model.parameters())
                box.train(range(unit, unit + steps), round_ * h, h / steps)
                unit += steps
                work.append((steps, theta - _values(box)))
        total = sum(steps for steps, _ in work)
        delta = torch.stack([each * (steps / total) for steps, each in work]).sum(0)
        outer_step(theta.numpy(), momentum.numpy(), delta.numpy(), **outer)
    vector_to_parameters(
        torch.from_numpy(reached(theta.numpy(), momentum.numpy(), **outer)), boxes[0].model.parameters()
    )
    return evaluate(boxes[0].model, data, run.evaluation.max_tokens, CPU).loss, unit


def _opened(spec: str) -> tuple[RunSpec, TextData]:
    run = parse_spec(spec)
    return run, TextData(run)


def _values(box: Replica) -> Tensor:
    return parameters_to_vector(box.model.parameters()).detach().clone()
