"""Several replicas of a small Llama in one pass, in plain torch: the parameters of all are stacked, [replicas, …].

So a round of eight workers takes a fraction of the time of eight models, whose tensors are too small to keep a core
busy. The shapes and the initial parameters are those of a run's model; `tests/test_benchmarks.py` compares the losses.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Parameters = dict[str, Tensor]


class Replicas:
    """The forward pass of `count` replicas of a transformers Llama without biases, tied weights or dropout."""

    def __init__(self, model: nn.Module, count: int) -> None:
        config: Any = model.config
        self.count, self._eps = count, float(config.rms_norm_eps)
        self._layers, self._heads = int(config.num_hidden_layers), int(config.num_attention_heads)
        self._head_size = int(config.hidden_size) // self._heads
        self.names = [name for name, _ in model.named_parameters()]
        self.shapes = [each.shape for each in model.parameters()]
        base, device = float(config.rope_parameters["rope_theta"]), next(model.parameters()).device
        self._frequencies = 1 / base ** (torch.arange(0, self._head_size, 2, device=device) / self._head_size)

    @property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    def losses(self, parameters: Parameters, batches: Tensor) -> Tensor:
        """Return the mean cross-entropy of each replica in nats per token, float32[count].

        batches  int64[count, sequences, length + 1]
        """
        tokens, targets = batches[..., :-1], batches[..., 1:]
        each = functional.cross_entropy(
            self._logits(parameters, tokens).flatten(0, 2), targets.flatten(), reduction="none"
        )
        return each.view(self.count, -1).mean(1)

    def _logits(self, parameters: Parameters, tokens: Tensor) -> Tensor:
        embeddings = parameters["model.embed_tokens.weight"]
        vocabulary = embeddings.shape[1]
        offsets = vocabulary * torch.arange(self.count, device=tokens.device)[:, None, None]
        states = functional.embedding(tokens + offsets, embeddings.flatten(0, 1))
        turns = torch.arange(tokens.shape[-1], device=tokens.device)[:, None] * self._frequencies
        rotation = torch.cat([turns, turns], dim=1)
        cosine, sine = rotation.cos(), rotation.sin()
        for layer in range(self._layers):
            name = f"model.layers.{layer}."
            states = states + self._attention(parameters, name, states, cosine, sine)
            states = states + self._feed_forward(parameters, name, states)
        return _linear(self._norm(states, parameters["model.norm.weight"]), parameters["lm_head.weight"])

    def _attention(self, parameters: Parameters, name: str, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        states = self._norm(states, parameters[name + "input_layernorm.weight"])
        query, key, value = (
            _linear(states, parameters[f"{name}self_attn.{each}_proj.weight"])
            .unflatten(-1, (self._heads, self._head_size))
            .transpose(-2, -3)
            .flatten(0, 1)
            for each in "qkv"
        )
        query, key = (each * cosine + _half_turned(each) * sine for each in (query, key))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(-2, -3).flatten(-2).unflatten(0, (self.count, -1))
        return _linear(mixed, parameters[name + "self_attn.o_proj.weight"])

    def _feed_forward(self, parameters: Parameters, name: str, states: Tensor) -> Tensor:
        states = self._norm(states, parameters[name + "post_attention_layernorm.weight"])
        gate, up = (_linear(states, parameters[f"{name}mlp.{each}_proj.weight"]) for each in ("gate", "up"))
        return _linear(functional.silu(gate) * up, parameters[name + "mlp.down_proj.weight"])

    def _norm(self, states: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(states, states.shape[-1:], eps=self._eps) * weight[:, None, None]

    def stacked(self, vector: Tensor) -> Parameters:
        """Return float32[count, elements] as parameters that can be trained in place."""
        parts = vector.split(self.sizes, dim=1)
        return {
            name: part.reshape(self.count, *shape).clone().requires_grad_()
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def flat(self, parameters: Parameters) -> Tensor:
        """Return the opposite of `stacked`."""
        return torch.cat([parameters[name].detach().flatten(1) for name in self.names], dim=1)


def _linear(states: Tensor, weight: Tensor) -> Tensor:
    """Multiply [replicas, sequences, length, in] by [replicas, out, in]."""
    return torch.bmm(states.flatten(1, 2), weight.transpose(1, 2)).unflatten(1, states.shape[1:3])


def _half_turned(states: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
