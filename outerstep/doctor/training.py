"""What training needs: the data, the model, and the memory that training it takes."""

import threading
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import nn

from outerstep.common.quantities import bytes_text, count_text, counted, duration_text
from outerstep.doctor.examination import Finding, fine, warning, wrong
from protocol.fragments import Layout, TensorSpec, first_difference
from protocol.messages import DataSummary, FrozenSummary, RunDetail, data_difference
from protocol.spec.model import MAX_PARAMETERS, Base
from protocol.spec.run import RunSpec
from worker import memory
from worker.accounts.machine import host_free_bytes
from worker.box import base_of, check_suited, shard_cache, summary_of_frozen
from worker.data.open_training_set import open_training_set
from worker.inner.compact import Held
from worker.inner.data_parallel import Mode
from worker.inner.execution import layers_of
from worker.inner.optimizers import hidden_matrices
from worker.memory import IN_USE, OUTER_STATE_BYTES, WORK_BYTES
from worker.models.building import build_model, check_vocabulary
from worker.settings import BoxSettings
from worker.state.parameters import tensor_specs


@dataclass(frozen=True)
class Data:
    source: str
    summary: DataSummary
    units: int
    vocabulary: int
    held_out_tokens: int


def open_data(spec: RunSpec, settings: BoxSettings, stop: threading.Event) -> Data:
    """Open the training set, and prepare it if necessary, until `stop` is set. Raises what `open_training_set`
    raises."""
    check_suited(spec, 1)
    here = spec.with_source(settings.data)
    with closing(open_training_set(here, stop=stop, shards=shard_cache(settings))) as opened:
        return Data(here.data.source, opened.summary, opened.units_per_epoch, opened.vocabulary, opened.held_out_tokens)


def judge_data(seen: Data, run: RunDetail) -> list[Finding]:
    spec = run.spec
    trained = seen.summary.unit_tokens
    tokens = count_text(seen.units * (trained or spec.unit_tokens))
    said = f"{seen.source}: {seen.units} units of {spec.unit_tokens} tokens, {tokens} tokens in total"
    if trained is not None:
        said = (
            f"{seen.source}: {seen.units} units of {spec.unit_tokens} tokens. On average {trained} tokens of a unit "
            f"are trained on, {tokens} in total"
        )
    if run.data is not None and (difference := data_difference(seen.summary, run.data, spec.data)):
        return [wrong("data", difference, "copy the run's files here, or give their place with --data")]
    if spec.data.private:
        said += "; its digest is not sent"
    elif run.data is None:
        said += f"; digest {seen.summary.digest}. The first worker's set becomes the run's"
    else:
        said += "; the same digest as the run's workers"
    return [fine("data", said)]


def data_timeout(seconds: float) -> Finding:
    said = f"not ready after {duration_text(seconds)}; what was prepared or fetched is kept for the worker"
    return warning("data", said, "for much text, run `outerstep data prepare` beforehand, once for all boxes")


MOMENT_BYTES = 4  # per element, fp32


@dataclass(frozen=True)
class Model:
    """The run's model. `elements`: trained elements; `frozen`: frozen ones; `frozen_bytes`: what these take in 4 bits,
    None if they are held like the trained ones. `optimizer_bytes`: of the inner optimizers,
    per trained element; None if they are the user's own. `largest_layer`: elements of the largest part that fully_shard
    gathers at once."""

    kind: str
    tensors: list[TensorSpec]
    elements: int
    frozen: int
    frozen_bytes: int | None
    frozen_summary: FrozenSummary | None
    optimizer_bytes: float | None
    largest_layer: int


def build(
    run: RunDetail,
    processes: int,
    vocabulary: int | None,
    max_parameters: int = MAX_PARAMETERS,
    wanted: Base | None = None,
) -> Model:
    """Build the model in host memory, if it has at most `max_parameters`. `wanted`: --base. Raises ModelError,
    DataError and BoxError, as a worker does at its start."""
    spec = run.spec
    check_suited(spec, processes)
    base = base_of(spec, wanted)
    model = build_model(spec, torch.device("cpu"), max_parameters, base)
    if vocabulary is not None:
        check_vocabulary(model, vocabulary)
    tensors = tensor_specs(model)
    elements = sum(each.elements for each in tensors)
    frozen = summary_of_frozen(model, spec.model, base) if run.frozen is not None or base == "nf4" else None
    everything = _elements(model) if base == "full" or frozen is None else elements + frozen.elements
    held = [each.nbytes for each in model.parameters() if not each.requires_grad]
    return Model(
        type(model).__name__,
        tensors,
        elements,
        everything - elements,
        sum(held) if base == "nf4" else None,
        frozen,
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


def judge_model(seen: Model, run: RunDetail, layout: Layout | None) -> list[Finding]:
    if layout is not None and (difference := first_difference(layout.tensors, seen.tensors)):
        said = f"this worker's model is not the model of run {run.name}: {difference}"
        return [wrong("model", said, "install the same versions of outerstep and transformers as the run's workers")]
    if run.frozen is not None and seen.frozen_summary != run.frozen:
        said = f"this worker's frozen parameters are not those of run {run.name}"
        return [wrong("model", said, "load the same weights everywhere, from the same directory or revision")]
    said = f"{seen.kind}, {count_text(seen.elements)} parameters to train"
    said += f" and {count_text(seen.frozen)} frozen" if seen.frozen else ""
    if layout is None:
        return [fine("model", f"{said}; the first worker's model becomes the run's")]
    return [fine("model", f"{said}, matching the run's layout of {counted(len(layout.fragments), 'fragment')}")]


def model_timeout(seconds: float) -> Finding:
    said = f"not built after {duration_text(seconds)}; weights that were already fetched are kept"
    return wrong("model", said, "run the doctor again", passing=True)


TIGHT = 0.8  # share of a device; activations need the rest
FP32_BYTES = 4


@dataclass(frozen=True)
class MemoryNeeded:
    """Bytes needed, without activations. `device_bytes`: per device; `host_bytes`: of all processes together;
    `assembling`: part of the latter, only while a sharded model is assembled. `offload`: gradients and the optimizer's
    are in host memory."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    outer_state: int
    work: int
    assembling: int
    offload: bool = False

    @property
    def device_bytes(self) -> int:
        return self.parameters + self.gathered + (0 if self.offload else self.gradients + self.optimizer)

    @property
    def host_bytes(self) -> int:
        offloaded = self.gradients + self.optimizer if self.offload else 0
        return max(self.outer_state + self.work + offloaded, self.assembling)


def memory_needed(
    model: Model,
    mode: Mode | None,
    processes: int,
    parameters: str = "fp32",
    moments: Held | None = None,
    *,
    mapped: bool = False,
    offload: bool = False,
) -> MemoryNeeded:
    """Return the memory that `processes` need if they share the model in this `mode` (None: a single process).
    `parameters`: fp32 or bf16; `moments`: --optimizer-state; `mapped`: the outer state and the work to send are in a
    file; `offload`: gradients and moments are in host memory.

    Replicas hold their gradients a second time, in the buckets of the all-reduce. With shards, two layers are gathered
    at a time, and each process first assembles the whole model in host memory. The outer state and the pseudo-gradient
    are in host memory once.
    """
    size = memory.PARAMETER_BYTES[parameters]
    parts = processes if mode == "fsdp" else 1
    optimizer = 2 * MOMENT_BYTES if model.optimizer_bytes is None else model.optimizer_bytes
    everything = model.elements + model.frozen
    frozen = size * model.frozen if model.frozen_bytes is None else model.frozen_bytes
    share = memory.MOMENT_BYTES[moments or parameters] / MOMENT_BYTES
    return MemoryNeeded(
        parameters=(size * model.elements + frozen) // parts,
        gradients=size * model.elements // parts * (2 if mode == "ddp" else 1),
        optimizer=int(optimizer * share * model.elements / parts),
        gathered=2 * size * model.largest_layer if mode == "fsdp" else 0,
        outer_state=0 if mapped else OUTER_STATE_BYTES * model.elements,
        work=WORK_BYTES * (min(IN_USE, model.elements) if mapped else model.elements),
        offload=offload,
        assembling=FP32_BYTES * everything * processes if mode == "fsdp" else 0,
    )


@dataclass(frozen=True)
class FreeMemory:
    """Free memory. `device_bytes`: of the GPU with the least free memory; None when training on the CPU. `host_bytes`:
    None if the system does not report it."""

    device_bytes: int | None
    host_bytes: int | None


def free_memory(device: torch.device, processes: int) -> FreeMemory:
    host = host_free_bytes()
    if device.type != "cuda":
        return FreeMemory(None, host)
    devices = [device] if processes == 1 else [torch.device("cuda", index) for index in range(processes)]
    return FreeMemory(min(torch.cuda.mem_get_info(each)[0] for each in devices), host)


def judge_memory(needed: MemoryNeeded, free: FreeMemory, processes: int, device: torch.device) -> list[Finding]:
    on_host = needed.host_bytes + (processes * needed.device_bytes if free.device_bytes is None else 0)
    each = "" if processes == 1 else f", each of {processes}"
    trained = f"gradients {bytes_text(needed.gradients)}, optimizer {bytes_text(needed.optimizer)}"
    said = (
        f"{bytes_text(needed.device_bytes)} on {device}{each} (parameters {bytes_text(needed.parameters)}"
        + ("" if needed.offload else f", {trained}")
        + (f", gathered layers {bytes_text(needed.gathered)}" if needed.gathered else "")
        + ") and activations; in host memory "
        + (f"{trained}, " if needed.offload else "")
        + (f"the outer state {bytes_text(needed.outer_state)} and " if needed.outer_state else "")
        + f"the work to send {bytes_text(needed.work)}"
        + (f", {bytes_text(needed.assembling)} at the start" if needed.assembling else "")
        + ". Free: "
        + (f"{bytes_text(free.device_bytes)} on {device}, " if free.device_bytes is not None else "")
        + f"{bytes_text(free.host_bytes)} of host memory"
    )
    if free.device_bytes is not None and needed.device_bytes > free.device_bytes:
        return [
            wrong(
                "memory",
                said,
                "use --fit auto, --gpus N with --mode fsdp, or a GPU with more memory",
            )
        ]
    if free.host_bytes is not None and on_host > free.host_bytes:
        return [wrong("memory", said, "stop other programs that use host memory, or use a machine with more")]
    if free.device_bytes is not None and needed.device_bytes > TIGHT * free.device_bytes:
        return [warning("memory", said, "little is left for activations: --activation-checkpointing saves some")]
    return [fine("memory", said)]
