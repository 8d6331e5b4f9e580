"""Inner optimizers for little memory: parameters in bf16 with stochastic rounding, moments in bf16 or in 8 bits.

A step decodes a piece of a parameter and of its moments to fp32, updates these with torch's own function, and encodes
them again. So the arithmetic is that of torch's optimizers, and only one piece is in fp32 at a time.

8 bits are block-wise, as in 8-bit Adam (arXiv 2110.02861): each block of 256 elements has its own scale in fp32.

    first moment, momentum   int8: value = code · scale / 127, as in the int8 codec, rounded to the nearest
    second moment            uint8: value = scale · 2^(−(255 − code) · OCTAVES / 255), 0 for code 0: a constant relative
                             error, since a small one must not become 0, by which the step would be divided

bf16 is rounded stochastically, with a probability in proportion to the distance: otherwise an update below half a unit
in the last place, 2^−9 of a value, would be lost each time. The random bits come from torch's default generator, which
the training loop seeds at the start of every round, so a resumed round repeats bit for bit.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim._muon import muon
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from worker.inner.offload import HostGradients, page_locked
from worker.state.optimizer_state import HELD

Held = Literal["fp32", "bf16", "8bit"]

BLOCK = 256
OCTAVES = 24
_PIECE, _PIECE_ON_DEVICE = 1 << 18, 1 << 24  # elements in fp32 at a time: what fits into a CPU's cache, few launches
_SCALE = "_scale"
_TINY = torch.finfo(torch.float32).tiny


def rounded_stochastically(values: Tensor) -> Tensor:
    """Return fp32 values in bf16, each rounded up or down with a probability in proportion to its distance."""
    bits = values.contiguous().view(torch.int32).flatten()
    noise = torch.empty(-(-len(bits) // 4), dtype=torch.int64, device=values.device).random_(-(1 << 63), None)
    noise = noise.view(torch.int16)[: len(bits)].to(torch.int32) & 0xFFFF
    return ((bits + noise) & -0x10000).view(torch.float32).to(torch.bfloat16).view(values.shape)


def encoded(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes, int8[n] if `signed`, else uint8[n], and the scales of the blocks, float32, of float32[n]."""
    blocks = nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(dim=1, keepdim=True)
    relative = blocks / scale.clamp(min=_TINY)
    if signed:
        codes = (relative * 127).round_().to(torch.int8)
    else:
        steps = relative.clamp_(min=_TINY).log2_().mul_(255 / OCTAVES).add_(255).round_().clamp_(min=1)
        codes = steps.mul_(blocks > 0).to(torch.uint8)
    return codes.flatten()[: len(values)], scale.flatten()


def decoded(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the values, float32[n], that `encoded` gave these codes."""
    padded = nn.functional.pad(codes, (0, -len(codes) % BLOCK)).view(-1, BLOCK)
    if codes.dtype is torch.int8:
        values = padded.float().mul_(scale[:, None] / 127)
    else:
        values = padded.float().sub_(255).mul_(OCTAVES / 255).exp2_().mul_(scale[:, None]).mul_(padded > 0)
    return values.flatten()[: len(codes)]


# Updates a parameter in place, given its group, itself, its gradient, its moments, all in fp32, and the number of steps
# so far, which the function increments.
Update = Callable[[dict[str, Any], Tensor, Tensor, list[Tensor], Tensor], None]


def _adamw(group: dict[str, Any], values: Tensor, gradient: Tensor, moments: list[Tensor], step: Tensor) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        [values],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],
        [step],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _sgd(group: dict[str, Any], values: Tensor, gradient: Tensor, moments: list[Tensor], step: Tensor) -> None:
    step += 1
    sgd(
        [values],
        [gradient],
        [*moments] or [None],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=False,
        maximize=False,
        foreach=False,
    )


def _muon(group: dict[str, Any], values: Tensor, gradient: Tensor, moments: list[Tensor], step: Tensor) -> None:
    step += 1
    muon(
        [values],
        [gradient],
        moments,
        has_complex=False,
        **{key: group[key] for key in ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps")},
        **{key: group[key] for key in ("ns_steps", "adjust_lr_fn")},
    )


class Compact(Optimizer):
    """An optimizer of torch, with what it keeps in another form. `like`: AdamW, SGD or Muon with their parameters and
    settings, before its first step. `offloaded`: has the gradients, which are in host memory, as the moments will be;
    None: parameters have theirs."""

    def __init__(self, like: Optimizer, held: Held, offloaded: HostGradients | None = None) -> None:
        self._held, self._offloaded = held, offloaded
        self._whole = False  # whether an update needs the whole parameter
        if isinstance(like, torch.optim.AdamW):
            self._update, self._moments = _adamw, {"exp_avg": True, "exp_avg_sq": False}  # whether it has a sign
        elif isinstance(like, torch.optim.SGD):
            self._update = _sgd
            self._moments = {"momentum_buffer": True} if like.defaults["momentum"] else {}
        elif isinstance(like, torch.optim.Muon):
            self._update, self._moments, self._whole = _muon, {"momentum_buffer": True}, True
        else:
            raise TypeError(f"{type(like).__name__} is not an optimizer that can be compact")
        super().__init__(like.param_groups, like.defaults | {HELD: held})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step on every parameter that has a gradient."""
        stepped = None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None if self._offloaded is None else self._offloaded.has(parameter):
                    self._step(group, parameter)
                    stepped = parameter.device
        if self._offloaded is not None and stepped is not None and stepped.type == "cuda":
            torch.cuda.synchronize(stepped)  # the copies are asynchronous, and a snapshot may read the moments next

    def _step(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            for name, signed in self._moments.items():
                state.update(self._empty(name, parameter, signed=signed))
        count = state["step"]
        for piece in self._pieces(parameter):
            values = _part(parameter, piece)
            # Made there: nothing waits for a copy.
            step = torch.full((), float(count), dtype=torch.float32, device=parameter.device)
            updated = values.float()
            moments = [
                self._decoded(state, name, piece, parameter.device).view(updated.shape) for name in self._moments
            ]
            self._update(group, updated, self._gradient(parameter, piece), moments, step)
            if updated is not values:
                values.copy_(rounded_stochastically(updated))
            for (name, signed), moment in zip(self._moments.items(), moments, strict=True):
                self._encode(state, name, piece, moment.flatten(), signed=signed)
        state["step"] = count + 1

    def _gradient(self, parameter: nn.Parameter, piece: slice | None) -> Tensor:
        """Return a slice of the gradient, in fp32 on the parameter's device."""
        if self._offloaded is not None:
            return self._offloaded.piece(parameter, piece)
        assert parameter.grad is not None
        return _part(parameter.grad, piece).float()

    def _pieces(self, parameter: Tensor) -> Iterator[slice | None]:
        """Yield slices of the flattened parameter; None for all of it."""
        if self._whole or not parameter.is_contiguous():
            yield None
            return
        size = _PIECE if parameter.device.type == "cpu" else _PIECE_ON_DEVICE
        yield from (slice(start, start + size) for start in range(0, parameter.numel(), size))

    def _empty(self, name: str, parameter: Tensor, *, signed: bool) -> dict[str, Tensor]:
        count = parameter.numel()
        if self._held != "8bit":
            kind = torch.bfloat16 if self._held == "bf16" else torch.float32
            return {name: self._zeros(count, kind, parameter.device)}
        codes = self._zeros(count, torch.int8 if signed else torch.uint8, parameter.device)
        return {name: codes, name + _SCALE: self._zeros(-(-count // BLOCK), torch.float32, parameter.device)}

    def _zeros(self, count: int, kind: torch.dtype, device: torch.device) -> Tensor:
        if self._offloaded is not None:
            return page_locked(count, kind, device)
        return torch.zeros(count, dtype=kind, device=device)

    def _decoded(self, state: dict[str, Tensor], name: str, piece: slice | None, device: torch.device) -> Tensor:
        values = _flat(state[name], piece).to(device, non_blocking=True)
        if self._held != "8bit":
            return values.float()
        return decoded(values, _flat(state[name + _SCALE], _blocks(piece)).to(device, non_blocking=True))

    def _encode(
        self, state: dict[str, Tensor], name: str, piece: slice | None, values: Tensor, *, signed: bool
    ) -> None:
        if self._held == "8bit":
            codes, scale = encoded(values, signed=signed)
            _flat(state[name + _SCALE], _blocks(piece)).copy_(scale, non_blocking=True)
            _flat(state[name], piece).copy_(codes, non_blocking=True)
        elif self._held == "bf16":
            _flat(state[name], piece).copy_(rounded_stochastically(values), non_blocking=True)
        elif self._offloaded is not None:  # what was updated is a copy
            _flat(state[name], piece).copy_(values, non_blocking=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned, or that of torch's optimizer. torch's own method would convert it
        to the parameters' dtype, and move it to their device."""
        super().load_state_dict(state_dict | {"state": {}})
        for group in self.param_groups:
            group[HELD] = self._held
        parameters: Iterable[Tensor] = (each for group in self.param_groups for each in group["params"])
        for index, parameter in enumerate(parameters):
            saved = state_dict["state"].get(index)
            if saved is None:
                continue
            state = self.state[parameter]
            state["step"] = torch.as_tensor(saved.get("step", 0.0), dtype=torch.float32).cpu().clone()
            for name, signed in self._moments.items():
                for key, empty in self._empty(name, parameter, signed=signed).items():
                    state[key] = empty.copy_(saved[key].flatten())


def _part(tensor: Tensor, piece: slice | None) -> Tensor:
    return tensor if piece is None else tensor.detach().view(-1)[piece]


def _flat(values: Tensor, piece: slice | None) -> Tensor:
    return values if piece is None else values[piece]


def _blocks(piece: slice | None) -> slice | None:
    return None if piece is None else slice(piece.start // BLOCK, piece.stop // BLOCK + (piece.stop % BLOCK > 0))
