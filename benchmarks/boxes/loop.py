"""DiLoCo with boxes of unequal speeds in virtual time, and the plain loop of one box. The parts are the worker's own:
model, data, inner optimizer, schedule. Payloads are not encoded.

A round lasts H inner steps of the fastest box. Each other box does as many as it manages in that time; what rounding
leaves over is done in a later round. Weights are tokens.
"""

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.replica import CPU, Replica
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


def together(spec: str, speeds: list[float], delay: float = 0.0) -> tuple[float, int]:
    """Return the held-out loss of the run's last state, nats per token, and the inner steps of all boxes. `delay`: the
    share of a round that a sync takes, during which the boxes train on, each from its own outer step: these steps are
    the first of the next round."""
    run, data = _opened(spec)
    boxes, owed = [Replica(run, data) for _ in speeds], [0.0] * len(speeds)
    h = run.sync.inner_steps
    theta = _values(boxes[0])
    momentum = torch.zeros_like(theta)
    outer: dict[str, float] = {"learning_rate": run.outer.learning_rate, "beta": run.outer.momentum}
    local = [theta.clone() for _ in boxes]
    delta, sent = torch.zeros_like(theta), list(local)
    unit = 0
    for round_ in range(run.sync.rounds):
        steps, first = [0] * len(boxes), [0] * len(boxes)
        for index, speed in enumerate(speeds):
            wanted = speed * h + owed[index]
            steps[index] = int(wanted + 1e-9)
            owed[index] = wanted - steps[index]
            first[index] = int(delay * steps[index]) if round_ else 0
        for begin, end in ([0] * len(boxes), first), (first, steps):
            if begin is first and round_:  # the deltas are there
                outer_step(theta.numpy(), momentum.numpy(), delta.numpy(), **outer)
                local = [theta + (now - then) for now, then in zip(local, sent, strict=True)]
            for index, box in enumerate(boxes):
                if (count := end[index] - begin[index]) > 0:
                    vector_to_parameters(local[index].clone(), box.model.parameters())
                    stride = h / steps[index]
                    box.train(range(unit, unit + count), round_ * h + begin[index] * stride, stride)
                    local[index] = _values(box)
                    unit += count
        delta = torch.stack(
            [(theta - now) * (count / sum(steps)) for now, count in zip(local, steps, strict=True) if count]
        ).sum(0)
        sent = [_alone(theta, momentum, now, outer) for now in local]
        local = list(sent)
    outer_step(theta.numpy(), momentum.numpy(), delta.numpy(), **outer)
    vector_to_parameters(
        torch.from_numpy(reached(theta.numpy(), momentum.numpy(), **outer)), boxes[0].model.parameters()
    )
    return evaluate(boxes[0].model, data, run.evaluation.max_tokens, CPU).loss, unit


def _opened(spec: str) -> tuple[RunSpec, TextData]:
    run = parse_spec(spec)
    return run, TextData(run)


def _alone(theta: Tensor, momentum: Tensor, now: Tensor, outer: dict[str, float]) -> Tensor:
    """Return the state after an outer step on the pseudo-gradient of one box, which is at `now`."""
    reached_alone = theta.clone()
    outer_step(reached_alone.numpy(), momentum.clone().numpy(), (theta - now).numpy(), **outer)
    return reached_alone


def _values(box: Replica) -> Tensor:
    return parameters_to_vector(box.model.parameters()).detach().clone()
