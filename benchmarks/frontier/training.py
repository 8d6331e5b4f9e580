"""DiLoCo and synchronous training of stacked replicas, with the product's codecs, schedule and outer step.

A round is what docs/design.md describes: H inner steps from θ minus what the upload codec has left out before, Δ = θ −
θ_local, its round trip through the upload codec, the mean, its round trip through the download codec, the outer step.
Which work unit a replica trains on depends only on the step, as in a real run of equally fast workers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.frontier.model import Replicas
from protocol.outer_step import outer_step, reached
from protocol.spec.model import EMBEDDING_STD
from protocol.spec.run import RunSpec
from worker.codecs import round_trip
from worker.data.open_training_set import TextData
from worker.inner.evaluation import evaluate
from worker.inner.loss import Loss
from worker.inner.optimizers import hidden_matrices
from worker.inner.schedules import learning_rate
from worker.models.building import build_model

FEEDBACK = {"2bit", "ternary", "sparse"}  # codecs with error feedback
_NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)  # coefficients of five steps, as in torch.optim.Muon
_MATCH_RMS = 0.2
_WARM_UP = 3  # steps before one is captured
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Outer:
    """The outer optimizer in one round: the outer learning rate and momentum."""

    learning_rate: float
    momentum: float


class Inner:
    """The inner optimizers of all replicas: Muon for hidden matrices and AdamW for the rest, or AdamW for all, with
    each replica's gradient clipped to norm 1. `rate` is the learning rate of the next step; of parameters on a GPU a
    tensor, so that a captured step reads it."""

    def __init__(self, spec: RunSpec, parameters: dict[str, Tensor], hidden: set[str], device: torch.device) -> None:
        inner, on_gpu = spec.inner, device.type == "cuda"
        self.rate = torch.zeros((), device=device)
        self._inner, self._parameters = inner, list(parameters.values())
        self._hidden = [each for name, each in parameters.items() if name in hidden]
        rest = [each for name, each in parameters.items() if name not in hidden]
        betas = (inner.beta1, inner.beta2)
        self._adamw = torch.optim.AdamW(
            rest, self.rate, betas, weight_decay=inner.weight_decay, fused=True, capturable=on_gpu
        )
        self._momenta = [torch.zeros_like(each) for each in self._hidden]

    @torch.no_grad()
    def step(self) -> None:
        inner, rate = self._inner, self.rate
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients]).norm(dim=0)
        scale = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for each in gradients:
            each *= scale.view(-1, *[1] * (each.ndim - 1))
        self._adamw.step()
        for parameter, momentum in zip(self._hidden, self._momenta, strict=True):
            assert parameter.grad is not None
            momentum.lerp_(parameter.grad, 1 - inner.momentum)
            parameter *= 1 - rate * inner.weight_decay
            size = _MATCH_RMS * max(parameter.shape[1:]) ** 0.5
            parameter -= rate * size * _orthogonal(momentum)
        for each in self._parameters:
            each.grad = None


def _orthogonal(matrices: Tensor) -> Tensor:
    """Return the nearest orthogonal matrices by Newton and Schulz, in bf16, as `torch.optim.Muon` does."""
    a, b, c = _NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Captured:
    """Calls `step` with batches of one shape. On a GPU the call is captured as a CUDA graph and replayed: steps of
    models this small take less time than launching their kernels."""

    def __init__(self, step: Callable[[Tensor], None], device: torch.device) -> None:
        self._step, self._device, self._calls = step, device, 0
        self._batches: Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batches: Tensor) -> None:
        if self._device.type != "cuda":
            self._step(batches)
            return
        if self._batches is None:
            self._batches = torch.empty_like(batches, device=self._device)
        self._batches.copy_(batches)
        self._calls += 1
        if self._calls <= _WARM_UP:
            self._step(self._batches)
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._step(self._batches)
        self._graph.replay()


class Training:
    """One simulated run of `workers`, on `device`. `spec.sync` has the number of rounds; each `round` may have its own
    H. The outer state and the codecs are on the CPU."""

    def __init__(self, spec: RunSpec, workers: int, device: torch.device = CPU) -> None:
        self.spec, self.workers, self.device, self.steps = spec, workers, device, 0
        self.model = build_model(spec, CPU)
        if spec.model.preset is None:  # embeddings as large as the preset's
            seeded = torch.Generator().manual_seed(spec.seed)
            embeddings = self.model.get_parameter("model.embed_tokens.weight")
            nn.init.normal_(embeddings, std=EMBEDDING_STD["tiny"], generator=seeded)
        self.theta = parameters_to_vector(self.model.parameters()).detach().clone()
        self.model.to(device)
        self._data = TextData(spec)
        self._replicas = Replicas(self.model, workers)
        names = {id(each): name for name, each in self.model.named_parameters()}
        muon = spec.inner.optimizer == "muon"
        self._hidden = {names[id(each)] for each in hidden_matrices(self.model)} if muon else set[str]()
        self.momentum, self.outer = torch.zeros_like(self.theta), Outer(1.0, 0.0)
        self._local = self._replicas.stacked(self.theta.repeat(workers, 1).to(device))
        self._inner = Inner(spec, self._local, self._hidden, device)
        self._take = Captured(self._inner_step, device)
        self._unsent = torch.zeros(workers, len(self.theta))
        self._undelivered = torch.zeros_like(self.theta)

    def round(self, inner_steps: int, upload: str, download: str, outer: Outer) -> tuple[Tensor, Tensor]:
        """Train one round of H = `inner_steps`. Return what the first replica encodes with the codec `upload`, and what
        is encoded with `download` for all, float32[n] each."""
        self.outer = outer
        for _ in range(inner_steps):
            self._advance(torch.stack(self._units(self.workers)))
        deltas = self.theta - self._replicas.flat(self._local).cpu()
        sent = torch.stack([round_trip(each, upload) for each in deltas])
        if upload in FEEDBACK:
            self._unsent = deltas - sent
        senders = (sent != 0).sum(0).clamp(min=1) if upload == "sparse" else self.workers
        mean = sent.sum(0) / senders
        if download in FEEDBACK:
            mean += self._undelivered
        delta = round_trip(mean, download)
        if download in FEEDBACK:
            self._undelivered = round_trip(mean - delta, "int8")
        outer_step(
            *(each.numpy() for each in (self.theta, self.momentum, delta)),
            learning_rate=outer.learning_rate,
            beta=outer.momentum,
        )
        self._set_local(self.theta - self._unsent)
        return deltas[0], mean

    def train_synchronously(self, steps: int, batches: int) -> None:
        """Take steps of one replica, with `batches` units in each."""
        for _ in range(steps):
            self._advance(torch.cat(self._units(batches))[None])
        self.theta = self._replicas.flat(self._local)[0].cpu()
        self.momentum = torch.zeros_like(self.theta)

    def _units(self, batches: int) -> list[Tensor]:
        return [self._data.unit(self.steps * batches + each) for each in range(batches)]

    def _advance(self, batches: Tensor) -> None:
        """Take the next inner step on int64[replicas, sequences, length + 1]."""
        self._inner.rate.fill_(learning_rate(self.spec, self.steps, self.spec.inner.learning_rate))
        self._take(batches)
        self.steps += 1

    def _inner_step(self, batches: Tensor) -> None:
        self._replicas.losses(self._local, batches).sum().backward()
        self._inner.step()

    def start_from(self, point: Tensor) -> None:
        """Make `point`, float32[n], the state before the first step."""
        self.theta = point.clone()
        self._set_local(self.theta.expand(self.workers, -1))

    def point(self) -> Tensor:
        """Return the parameters that the outer optimizer has reached, float32[n], which are evaluated."""
        lr, beta = self.outer.learning_rate, self.outer.momentum
        return torch.from_numpy(reached(self.theta.numpy(), self.momentum.numpy(), learning_rate=lr, beta=beta))

    def loss(self, point: Tensor | None = None, tokens: int = 65_536, data: TextData | None = None) -> float:
        """Return the held-out loss of `point` (None: what is reached) on `data` (None: its own), nats per byte."""
        self.set_model(self.point() if point is None else point)
        return evaluate(self.model, data or self._data, tokens, self.device, Loss(self.model, "fp32")).loss

    def set_model(self, point: Tensor) -> None:
        """Give `model` the parameters `point`, float32[n]."""
        vector_to_parameters(point.to(self.device, copy=True), self.model.parameters())

    @torch.no_grad()
    def _set_local(self, values: Tensor) -> None:
        for name, part in self._replicas.stacked(values.to(self.device)).items():
            self._local[name].copy_(part)
