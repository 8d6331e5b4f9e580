"""The run's model, built on this box: whether its tensors are the run's, and what it takes of memory."""

from dataclasses import dataclass

import torch
from torch import nn

from outerstep.common.quantities import count_text, counted, duration_text
from outerstep.doctor.finding import Finding, fine, wrong
from protocol.fragments import Layout, TensorSpec, first_difference
from protocol.messages import FrozenSummary, RunDetail
from protocol.spec.model import MAX_PARAMETERS
from protocol.spec.run import RunSpec
from worker.box import check_suited
from worker.inner.execution import layers_of
from worker.inner.optimizers import hidden_matrices
from worker.models.building import build_model, check_vocabulary
from worker.state.parameters import frozen_summary, tensor_specs

MOMENT_BYTES = 4  # of an element, fp32


@dataclass(frozen=True)
class Model:
    """`elements` are trained, `frozen` not. `optimizer_bytes`: of the inner optimizers, per trained element; None: they
    are the user's own. `largest_layer`: elements of the largest part that fully_shard gathers at once."""

    kind: str
    tensors: list[TensorSpec]
    elements: int
    frozen: int
    frozen_summary: FrozenSummary | None
    optimizer_bytes: float | None
    largest_layer: int


def look(run: RunDetail, processes: int, vocabulary: int | None, max_parameters: int = MAX_PARAMETERS) -> Model:
    """Build the model in host memory, if it has at most `max_parameters`. Raises ModelError, DataError and BoxError, as
    a worker would at its start."""
    spec = run.spec
    check_suited(spec, processes)
    model = build_model(spec, torch.device("cpu"), max_parameters)
    if vocabulary is not None:
        check_vocabulary(model, vocabulary)
    tensors = tensor_specs(model)
    elements = sum(each.elements for each in tensors)
    everything = _elements(model)
    return Model(
        type(model).__name__,
        tensors,
        elements,
        everything - elements,
        frozen_summary(model) if run.frozen is not None else None,
        _optimizer_bytes(spec, model, elements),
        max(map(_elements, layers_of(model)), default=everything),
    )


def _elements(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def _optimizer_bytes(spec: RunSpec, model: nn.Module, elements: int) -> float | None:
    match spec.inner.optimizer:
        case "adamw":
            return 2 * MOMENT_BYTES
        case "sgd":
            return MOMENT_BYTES if spec.inner.momentum else 0
        case "muon":
            hidden = sum(each.numel() for each in hidden_matrices(model))
            return MOMENT_BYTES * (2 - hidden / elements)
        case _:
            return None


def judge(seen: Model, run: RunDetail, layout: Layout | None) -> list[Finding]:
    if layout is not None and (difference := first_difference(layout.tensors, seen.tensors)):
        said = f"this worker's model is not the model of the run {run.name}: {difference}"
        return [wrong("model", said, "install the versions of outerstep and transformers that the run's workers have")]
    if run.frozen is not None and seen.frozen_summary != run.frozen:
        said = f"this worker's frozen parameters are not those of the run {run.name}"
        return [wrong("model", said, "load the same weights everywhere, of the same directory or revision")]
    said = f"{seen.kind}, {count_text(seen.elements)} parameters to train"
    said += f" and {count_text(seen.frozen)} frozen" if seen.frozen else ""
    if layout is None:
        return [fine("model", f"{said}; the first worker's becomes the run's")]
    return [fine("model", f"{said}, as the run's layout has them in {counted(len(layout.fragments), 'fragment')}")]


def judge_lateness(seconds: float) -> Finding:
    said = f"not built after {duration_text(seconds)}: if it is weights that are fetched, what was fetched is kept"
    return wrong("model", said, "start the doctor again", passing=True)
