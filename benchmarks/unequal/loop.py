"""DiLoCo with workers of unequal speeds, in plain torch and virtual time: the unit of time is an inner step of speed 1.

A round lasts H = 50 units of time. A worker trains from the newest state for as many whole rounds as it needs for
`least` inner steps, and its contribution goes into the mean of the round in which it ends: it is *stale* by the rounds
that have closed since it began. `Rule` says how a contribution is merged; weights are tokens unless it says otherwise.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from protocol.spec.run import RunSpec, parse_spec
from worker.data.open_training_set import TextData
from worker.inner.evaluation import evaluate
from worker.models.building import build_model

SPEEDS = (1.0, 1.0, 1.0, 1.0, 0.5, 0.25, 0.1, 0.02)
FASTEST = SPEEDS[:5]
EQUAL = (sum(SPEEDS) / len(SPEEDS),) * len(SPEEDS)
H = 50
LEARNING_RATE, WARMUP, FINAL = 8e-3, 100, 0.1
OUTER_LEARNING_RATE, MOMENTUM = 1.0, 0.6
EVALUATION_TOKENS = 131_072
SPEC = """
name = "unequal"
seed = {seed}
[model]
preset = "tiny"
[data]
source = "python-stdlib"
sequence_length = 64
[inner]
optimizer = "adamw"
batch_size = 8
learning_rate = {learning_rate}
[sync]
rounds = 1
inner_steps = {h}
"""


@dataclass(frozen=True)
class Stale:
    """A contribution: its pseudo-gradient, its tokens in units, and the means of the rounds that closed meanwhile."""

    delta: Tensor
    units: int
    missed: Sequence[Tensor]


# What a rule makes of one contribution: the pseudo-gradient to merge, and its weight. It is given the outer momentum.
Rule = Callable[[Stale, Tensor], tuple[Tensor, float]]


def tokens(each: Stale, momentum: Tensor) -> tuple[Tensor, float]:
    """As it is."""
    return each.delta, each.units


def decayed(each: Stale, momentum: Tensor) -> tuple[Tensor, float]:
    """Its weight is divided by 1 + its staleness, as in FedAsync (arXiv 1903.03934, with a = 1)."""
    return each.delta, each.units / (1 + len(each.missed))


def corrected(each: Stale, momentum: Tensor) -> tuple[Tensor, float]:
    """Without what the missed rounds have in common with it: minus the first missed mean (`worker.state.work.Late`)."""
    return each.delta - each.missed[0] if each.missed else each.delta, each.units


class HeLoCo:
    """Each tensor of a stale pseudo-gradient is aligned with the outer momentum (HeLoCo, arXiv 2606.00271): shrunk
    along it if they oppose, and turned towards it if they hardly agree. The constants are ours."""

    def __init__(self, sizes: Sequence[int], *, enough: float = 0.2, shrink: float = 1.0, turn: float = 0.5) -> None:
        self._sizes, self._enough, self._shrink, self._turn = list(sizes), enough, shrink, turn

    def __call__(self, each: Stale, momentum: Tensor) -> tuple[Tensor, float]:
        if not each.missed:
            return each.delta, each.units
        parts = zip(each.delta.split(self._sizes), momentum.split(self._sizes), strict=True)
        return torch.cat([self._aligned(delta, reference) for delta, reference in parts]), each.units

    def _aligned(self, delta: Tensor, momentum: Tensor) -> Tensor:
        norm, scale = float(delta.norm()), float(momentum.norm())
        if norm == 0 or scale == 0:
            return delta
        along, towards = delta / norm, momentum / scale
        cosine, confidence = float(along @ towards), norm / (norm + scale)
        if cosine >= self._enough:
            return delta
        if cosine < 0:
            return delta - min(self._shrink * -cosine * confidence, 1.0) * cosine * norm * towards
        part = self._turn * (1 - cosine / self._enough) * confidence
        turned = (1 - part) * along + part * towards
        return turned * (norm / float(turned.norm()))


Merge = Callable[[list[tuple[Tensor, float]]], Tensor]


def mean(parts: list[tuple[Tensor, float]]) -> Tensor:
    """The weighted mean."""
    total = sum(weight for _, weight in parts)
    return torch.stack([delta * (weight / total) for delta, weight in parts]).sum(0)


class RadialDirectional:
    """Norms and directions are averaged separately, by tensor (RDA of Decoupled DiLoCo, arXiv 2604.21428)."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)

    def __call__(self, parts: list[tuple[Tensor, float]]) -> Tensor:
        by_tensor = zip(*(delta.split(self._sizes) for delta, _ in parts), strict=True)
        weights = torch.tensor([weight for _, weight in parts])
        return torch.cat([self._merged(torch.stack(each), weights / weights.sum()) for each in by_tensor])

    def _merged(self, deltas: Tensor, weights: Tensor) -> Tensor:
        norms = deltas.norm(dim=1).clamp_min(1e-12)
        direction = weights @ (deltas / norms[:, None])
        return (weights @ norms) * direction / direction.norm().clamp_min(1e-12)


@dataclass
class Box:
    """One worker: its model, its inner optimizer, and what it is training."""

    speed: float
    model: nn.Module
    optimizer: torch.optim.Optimizer
    start: Tensor | None = None
    ends: int = 0  # the round in which its contribution is due
    units: int = 0
    owed: float = 0.0  # parts of inner steps that rounding left over
    missed: list[Tensor] = field(default_factory=list)


class Loop:
    """The data, the schedule and the boxes of one simulated run of `rounds` rounds."""

    def __init__(self, speeds: Iterable[float], rounds: int, seed: int) -> None:
        self.spec: RunSpec = parse_spec(SPEC.format(seed=seed, learning_rate=LEARNING_RATE, h=H))
        self._data, self._unit, self._steps = TextData(self.spec), 0, rounds * H
        self.rounds, self.boxes = rounds, [self._box(speed) for speed in speeds]
        self.theta = parameters_to_vector(self.boxes[0].model.parameters()).detach().clone()
        self.momentum = torch.zeros_like(self.theta)
        self.trained = 0  # units

    @property
    def sizes(self) -> list[int]:
        return [each.numel() for each in self.boxes[0].model.parameters()]

    def _box(self, speed: float) -> Box:
        model = build_model(self.spec, torch.device("cpu"))
        model.train()
        return Box(speed, model, torch.optim.AdamW(model.parameters(), fused=True, betas=(0.9, 0.99)))

    def train(self, box: Box, units: int, begins: float, ends: float) -> None:
        """Train `box` for `units` inner steps, spread evenly over the time from `begins` to `ends`."""
        for step in range(units):
            batch, self._unit = self._data.unit(self._unit), self._unit + 1
            rate = self._rate(begins + (ends - begins) * step / units)
            _step(box, [batch], rate)
        self.trained += units

    def train_synchronously(self, steps: int) -> None:
        """Train the first box alone, with a batch of all boxes in each step."""
        box, at_once = self.boxes[0], len(self.boxes)
        for step in range(steps):
            batches = [self._data.unit(self._unit + index) for index in range(at_once)]
            self._unit += at_once
            _step(box, batches, self._rate(step * self._steps / steps))
        self.theta, self.trained = parameters_to_vector(box.model.parameters()).detach().clone(), steps * at_once

    def _rate(self, now: float) -> float:
        """The learning rate at a time: linear warmup, then half a cosine down to FINAL of the peak."""
        if now < WARMUP:
            return LEARNING_RATE * (now + 1) / WARMUP
        part = (now - WARMUP) / max(self._steps - WARMUP, 1)
        return LEARNING_RATE * (FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * part)))

    def outer_step(self, delta: Tensor) -> None:
        """SGD with Nesterov momentum, as torch's."""
        self.momentum = MOMENTUM * self.momentum + delta
        self.theta = self.theta - OUTER_LEARNING_RATE * (delta + MOMENTUM * self.momentum)

    def loss(self) -> float:
        """Return the held-out loss of the global parameters, nats per byte."""
        model = self.boxes[0].model
        _load(self.theta, model)
        return evaluate(model, self._data, EVALUATION_TOKENS, torch.device("cpu")).loss


def _load(theta: Tensor, model: nn.Module) -> None:
    vector_to_parameters(theta.clone(), model.parameters())  # which makes the parameters views of it


def _step(box: Box, batches: list[Tensor], rate: float) -> None:
    for group in box.optimizer.param_groups:
        group["lr"] = rate
    _loss(box.model, torch.cat(batches)).backward()
    nn.utils.clip_grad_norm_(box.model.parameters(), 1.0)
    box.optimizer.step()
    box.optimizer.zero_grad(set_to_none=True)


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return functional.cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())


def in_rounds(loop: Loop, least: int, rule: Rule, merge: Merge) -> None:
    """Train in rounds of H units of time. At a round's end, merge all contributions that are due."""
    for round_ in range(loop.rounds):
        _train_round(loop, round_, least, rule, merge)


def _train_round(loop: Loop, round_: int, least: int, rule: Rule, merge: Merge) -> None:
    for box in loop.boxes:
        if box.start is None:
            _begin(loop, box, round_, least)
    due = [box for box in loop.boxes if box.ends == round_]
    if not due:
        return
    merged = merge([rule(_contribution(box), loop.momentum) for box in due])
    loop.outer_step(merged)
    for box in due:
        box.start = None
    for box in loop.boxes:
        if box.start is not None:
            box.missed.append(merged)


def _begin(loop: Loop, box: Box, round_: int, least: int) -> None:
    """Let the box train from the newest state for the rounds that it needs for `least` inner steps. In virtual time, it
    may do so at once."""
    spans = max(math.ceil((least - box.owed) / (box.speed * H) - 1e-9), 1)
    spans = min(spans, loop.rounds - round_)
    wanted = box.speed * H * spans + box.owed
    _train_for(loop, box, round_, spans, int(wanted + 1e-9))
    box.owed = wanted - box.units


def _train_for(loop: Loop, box: Box, round_: int, spans: int, units: int) -> None:
    """Train the box for `units` inner steps, from the newest state. Its contribution is due after `spans`
    rounds, counted from `round_`."""
    box.start, box.ends, box.units, box.missed = loop.theta, round_ + spans - 1, units, []
    _load(loop.theta, box.model)
    loop.train(box, units, round_ * H, (round_ + spans) * H)


def _contribution(box: Box) -> Stale:
    assert box.start is not None
    delta = box.start - parameters_to_vector(box.model.parameters()).detach()
    return Stale(delta, box.units, box.missed)


CYCLE = 20  # rounds from the beginning of one absence to that of the next


def in_absences(loop: Loop, away: int, most: int, *, cut_off: int | None = None) -> None:
    """Train in rounds, with a coordinator that is away for the time of `away` rounds, every CYCLE rounds. The boxes
    train on for at most `most` times H inner steps, and contribute all of it when it is back. `cut_off`: the number of
    boxes that lose the coordinator; the others continue. None: all do."""
    for round_ in range(loop.rounds):
        if round_ % CYCLE == 0 and round_:
            for box in loop.boxes[:cut_off]:
                _train_for(loop, box, round_, away + 1, H * min(away + 1, most))
        _train_round(loop, round_, 1, tokens, mean)


def delayed_nesterov(loop: Loop) -> None:
    """Without rounds: each contribution of H inner steps is merged as it arrives, and the momentum moves once for as
    many as there are workers (delayed Nesterov, arXiv 2401.09135, algorithm 3 with c = 0)."""
    period, gathered, arrived = len(loop.boxes), torch.zeros_like(loop.theta), 0
    ends = {index: H / box.speed for index, box in enumerate(loop.boxes)}
    for box in loop.boxes:
        box.start = loop.theta
    while True:
        index = min(ends, key=lambda each: (ends[each], each))
        box, now = loop.boxes[index], ends[index]
        if now > loop.rounds * H + 1e-6:
            return
        assert box.start is not None
        _load(box.start, box.model)
        loop.train(box, H, now - H / box.speed, now)
        delta = box.start - parameters_to_vector(box.model.parameters()).detach()
        gathered, arrived = gathered + delta, arrived + 1
        if arrived % period:
            loop.theta = loop.theta - OUTER_LEARNING_RATE * delta / period
        else:
            loop.momentum = MOMENTUM * loop.momentum + gathered / period
            loop.theta = loop.theta - OUTER_LEARNING_RATE * (MOMENTUM * loop.momentum + delta / period)
            gathered = torch.zeros_like(loop.theta)
        box.start, ends[index] = loop.theta, now + H / box.speed
