"""The inner optimizers: one function per name in `protocol.spec.sections.OPTIMIZERS`, or a function of the user.

Each takes the model and the spec's [inner] and returns the optimizers that together take one inner step, in stepping
order, with the peak learning rate in every parameter group.
"""

import logging
from collections import Counter
from itertools import chain

import torch
from torch import nn
from torch.optim import Optimizer

from protocol.spec.sections import OPTIMIZERS, InnerSpec
from worker.errors import ModelError
from worker.inner.compact import Compact, Held
from worker.inner.offload import HostGradients
from worker.models.user_code import call_user_function

log = logging.getLogger(__name__)


def adamw(model: nn.Module, inner: InnerSpec) -> list[Optimizer]:
    """AdamW for every trainable parameter."""
    return [_adamw(_trainable(model), inner)]


def muon(model: nn.Module, inner: InnerSpec) -> list[Optimizer]:
    """Muon for the hidden matrices, AdamW for the embeddings, the head, norms and biases: MuLoCo (arXiv 2505.23725).

    As in MuLoCo, the momentum is not Nesterov's. Updates are scaled to the RMS of AdamW's (arXiv 2502.16982, equation
    4), so that both optimizers share a learning rate and a weight decay. MuLoCo scales by √(rows / columns) instead:
    its rate ρ corresponds to 5 · ρ / √d here for d × d matrices, so its 0.044 at width 1024 is 0.007 here.

    Raises ModelError if torch has no Muon or the model no hidden matrices.
    """
    if not hasattr(torch.optim, "Muon"):
        raise ModelError(
            f'inner.optimizer = "muon" needs torch 2.9 or newer; this is {torch.__version__}. '
            "Run: pip install --upgrade torch"
        )
    hidden = hidden_matrices(model)
    if not hidden:
        raise ModelError(
            f'inner.optimizer = "muon": {type(model).__name__} has no trainable matrix between its embeddings and its '
            'head. Use "adamw" for this model.'
        )
    chosen = {id(parameter) for parameter in hidden}
    rest = [each for each in _trainable(model) if id(each) not in chosen]
    optimizer = torch.optim.Muon(
        hidden,
        lr=inner.learning_rate if inner.muon_learning_rate is None else inner.muon_learning_rate,
        weight_decay=inner.weight_decay,
        momentum=inner.momentum,
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    )
    counts = [sum(each.numel() for each in part) for part in (hidden, rest)]
    log.info("Muon trains %d matrices of %d parameters in all, AdamW the other %d", len(hidden), *counts)
    return [optimizer, _adamw(rest, inner)] if rest else [optimizer]


def sgd(model: nn.Module, inner: InnerSpec) -> list[Optimizer]:
    """SGD with momentum for every trainable parameter."""
    return [
        torch.optim.SGD(
            _trainable(model),
            lr=inner.learning_rate,
            momentum=inner.momentum,
            weight_decay=inner.weight_decay,
            fused=True,
        )
    ]


_BY_NAME = {name: globals()[name] for name in OPTIMIZERS}


def build_inner_optimizers(
    model: nn.Module, inner: InnerSpec, held: Held | None = None, offloaded: HostGradients | None = None
) -> list[Optimizer]:
    """Return the optimizers that train `model`. `held`: how those of OPTIMIZERS hold their moments; None: as torch
    does. `offloaded`: the gradients in host memory, where the moments will be too, with `held`; None: nothing is.
    Raises ModelError if they are unavailable or do not suit the model."""
    if inner.optimizer in _BY_NAME:
        built: list[Optimizer] = _BY_NAME[inner.optimizer](model, inner)
        return built if held is None else [Compact(each, held, offloaded) for each in built]
    returned = call_user_function("inner.optimizer", inner.optimizer, model, inner)
    own = list(returned) if isinstance(returned, list | tuple) else [returned]
    where = f"inner.optimizer = {inner.optimizer!r}"
    for each in own:
        if not isinstance(each, Optimizer):
            raise ModelError(f"{where} returned {type(each).__name__}, not a torch.optim.Optimizer or a list of them")
    _check_each_once(model, own, where)
    return own


def _check_each_once(model: nn.Module, optimizers: list[Optimizer], where: str) -> None:
    """Raise ModelError unless every trainable parameter is in exactly one group: one left out would silently stay
    untrained."""
    groups = chain.from_iterable(each.param_groups for each in optimizers)
    given = Counter(id(parameter) for group in groups for parameter in group["params"])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and given[id(parameter)] != 1:
            raise ModelError(
                f"{where}: the trainable parameter {name} is in {given[id(parameter)]} groups of its optimizers; it "
                "must be in exactly one. To freeze a parameter, call requires_grad_(False) in the model."
            )


def _adamw(parameters: list[nn.Parameter], inner: InnerSpec) -> Optimizer:
    """Fused: torch has that for CPU, CUDA and MPS."""
    return torch.optim.AdamW(
        parameters,
        lr=inner.learning_rate,
        betas=(inner.beta1, inner.beta2),
        weight_decay=inner.weight_decay,
        fused=True,
    )


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable matrices except those of the embeddings and of the head.

    The head is what transformers calls the output embeddings, otherwise the last Linear in module order.
    """
    modules = list(model.modules())
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    if head is None:
        head = next((each for each in reversed(modules) if isinstance(each, nn.Linear)), None)
    ends = [each for each in modules if isinstance(each, nn.Embedding)] + ([head] if head is not None else [])
    excluded = {id(parameter) for each in ends for parameter in each.parameters()}
    return [each for each in _trainable(model) if each.ndim == 2 and id(each) not in excluded]
