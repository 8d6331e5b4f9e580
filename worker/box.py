"""What one box brings to a run: the run's data and model, and the inner steps with this box's settings."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from protocol.messages import EvaluationReport, FrozenSummary
from protocol.spec.model import Base, ModelSpec
from protocol.spec.run import RunSpec
from protocol.spec.sections import OPTIMIZERS
from worker.accounts.machine import DeviceUse, peak_flops
from worker.data.fetching.remote_set import CacheSettings
from worker.data.fetching.shard_cache import cache_directory
from worker.data.open_training_set import open_training_set
from worker.data.training_set import TrainingSet
from worker.errors import BoxError, DataError
from worker.fit import check_memory, fitted, keep_choice, need_here
from worker.inner.compact import Held
from worker.inner.data_parallel import Mode, choose_mode, distribute, replica_budget, shard
from worker.inner.evaluation import evaluate
from worker.inner.execution import checkpoint_activations, compile_model, flops_per_token
from worker.inner.loss import Loss, check_packing, conversations_in, find_head
from worker.inner.micro_batch import MicroBatches, choose_micro_batch
from worker.inner.offload import HostGradients
from worker.inner.optimizers import build_inner_optimizers
from worker.inner.precision import Precision, cast_parameters, loss_scaler, precision_on, use_float8
from worker.inner.schedules import Schedule
from worker.inner.step import InnerStep
from worker.memory import Need
from worker.models.building import build_model, check_vocabulary
from worker.models.pretrained import Pretrained
from worker.process import give_back_free_memory
from worker.ranks import ALONE, Ranks
from worker.settings import BoxSettings
from worker.state.parameters import frozen_parameters, frozen_summary, summary_of

PROBE_TOKENS = 4096  # held-out tokens, to compare two states on the same ones

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Box:
    """A run's training on this machine.

    settings   with those that --fit has chosen
    base       how the frozen model of adapters is held
    frozen     of the weights that a frozen model in 4 bits was made from; None: the model holds them as they are
    evaluate   measures the held-out loss of the model as it is
    probe      the same on at most PROBE_TOKENS tokens
    ranks      the processes that share every batch
    logs       whether the first of them logs every inner step
    reasons    why mode and micro-batch are what they are
    """

    spec: RunSpec
    settings: BoxSettings
    device: torch.device
    precision: Precision
    base: Base
    frozen: FrozenSummary | None
    data: TrainingSet
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    schedule: Schedule
    step: InnerStep
    micro_batches: MicroBatches
    use: DeviceUse
    ranks: Ranks
    logs: bool
    reasons: list[str]
    evaluate: Callable[[], EvaluationReport] | None
    probe: Callable[[], EvaluationReport] | None


@dataclass(frozen=True)
class Chosen:
    """How this box trains the run `spec`, decided before the model is built. `settings`: with those that --fit has
    chosen; `base`: how the frozen model of adapters is held; `need`: of memory and disk, None if it is unknown."""

    spec: RunSpec
    settings: BoxSettings
    device: torch.device
    ranks: Ranks
    base: Base
    precision: Precision
    need: Need | None

    @property
    def assembled_in_host_memory(self) -> bool:
        """True if the model is built in host memory. From there a sharded one is moved to the device layer by layer,
        and one in bf16 once it is cast."""
        several = self.ranks.size > 1 and self.settings.parallel != "ddp"
        return (several or self.settings.param_dtype == "bf16") and self.base != "nf4"


@dataclass(frozen=True)
class Built:
    """The run's model, and how several processes share it (None: there is only one); `reasons`: why."""

    model: nn.Module
    mode: Mode | None
    reasons: list[str]


def set_up(
    spec: RunSpec,
    settings: BoxSettings,
    device: torch.device,
    *,
    stop: threading.Event | None = None,
    ranks: Ranks = ALONE,
    state_dir: Path | None = None,
) -> Box:
    """Return the run `spec` on `device`, in each of the processes `ranks`. `state_dir` keeps what --fit auto chooses.
    Raises DataError, ModelError, BoxError, OSError and, if `stop` is set while data are prepared or fetched,
    Stopped."""
    chosen = choose(spec, settings, device, ranks, state_dir)
    if state_dir is not None and chosen.settings is not settings:
        keep_choice(state_dir, chosen.settings)
    log.info("memory: %s", check_room(chosen))
    log.info("building the model")
    built = build(chosen)
    log.info("opening the training set")
    data = open_data(chosen, built.model, stop)
    return assemble(chosen, built, data)


def choose(
    spec: RunSpec, settings: BoxSettings, device: torch.device, ranks: Ranks = ALONE, state_dir: Path | None = None
) -> Chosen:
    """Return how this box trains the run. `state_dir`: where an earlier process kept what --fit auto chose. Raises
    BoxError for what cannot be combined, DataError, and ModelError."""
    check_suited(spec, ranks.size)
    settings = fitted(spec, settings, device, ranks, state_dir)
    base = base_of(spec, settings.lora_base)
    try:
        precision = precision_on(device, settings.precision, settings.param_dtype, base)
    except ValueError as error:
        raise BoxError(str(error)) from error
    need = need_here(spec, settings.model_copy(update={"lora_base": base}), device)
    chosen = Chosen(spec, settings, device, ranks, base, precision, need)
    check_combination(chosen, sharded=ranks.size > 1 and settings.parallel == "fsdp")
    return chosen


_OWN = "the run's inner.optimizer is {optimizer!r}, code that holds its moments as it does: leave out "

# Two things that do not go together, by their names in `check_combination`: why, and what to do.
EXCLUSIONS: dict[tuple[str, str], str] = {
    ("--offload", "no GPU"): "--offload moves gradients and moments from a GPU to host memory, and this worker trains "
    "on {device}: leave it out",
    ("--offload", "processes"): "--offload is for one GPU: share the model among several with --parallel fsdp instead",
    ("--offload", "fp16"): "--offload does not work with --precision fp16, whose gradients are scaled: use bf16",
    ("--offload", "--compile"): "--offload does not work with --compile, which computes all gradients at once: leave "
    "one out",
    ("--offload", "own optimizer"): f"{_OWN}--offload",
    ("--optimizer-state", "own optimizer"): f"{_OWN}--optimizer-state",
    ("--optimizer-state", "shards"): "the model is sharded, and so are the moments: leave out --optimizer-state",
    ("--compile", "shards"): "--compile does not work with a sharded model: leave it out, or use --parallel ddp",
    ("fp16", "shards"): "--precision fp16 does not work with a sharded model: leave it out, or use --parallel ddp",
    ("float8", "shards"): "--precision float8 does not work with a sharded model: use bf16, or --parallel ddp",
    (
        "nf4",
        "shards",
    ): "--parallel fsdp does not work with a frozen model in nf4: use --parallel ddp or --lora-base full",
}


def check_combination(chosen: Chosen, *, sharded: bool) -> None:
    """Raise BoxError for the first of EXCLUSIONS that applies. `sharded`: the processes share the model in shards."""
    settings, optimizer = chosen.settings, chosen.spec.inner.optimizer
    found = {
        "--compile": settings.compile,
        "--offload": settings.offload,
        "--optimizer-state": settings.optimizer_state is not None,
        "nf4": chosen.base == "nf4",
        "fp16": chosen.precision == "fp16",
        "float8": chosen.precision == "float8",
        "no GPU": chosen.device.type != "cuda",
        "processes": chosen.ranks.size > 1,
        "shards": sharded,
        "own optimizer": optimizer not in OPTIMIZERS,
    }
    for (one, other), message in EXCLUSIONS.items():
        if found[one] and found[other]:
            raise BoxError(message.format(device=chosen.device, optimizer=optimizer))


def check_room(chosen: Chosen) -> str:
    """Return what the model takes of this machine's memory, and how much is free, in words. Raises BoxError if there is
    too little."""
    if chosen.need is None:
        return "the size of a model from model.factory is known once it is built"
    ranks, cut = chosen.ranks.size, chosen.settings.parallel != "ddp" and chosen.base != "nf4"
    in_host_memory = chosen.assembled_in_host_memory
    return check_memory(chosen.need, chosen.device, ranks, ranks if cut else 1, in_host_memory=in_host_memory)


def build(chosen: Chosen) -> Built:
    """Return the run's model, not yet wrapped or sharded. Raises ModelError, and BoxError for what cannot be combined
    with the mode that suits its size."""
    spec, settings, device = chosen.spec, chosen.settings, chosen.device
    where = torch.device("cpu") if chosen.assembled_in_host_memory else device
    model = build_model(spec, where, settings.max_parameters, chosen.base, trains_on=device)
    give_back_free_memory()
    mode, reasons = None, []
    if chosen.ranks.size > 1:
        elements = sum(each.numel() for each in model.parameters())
        wanted = "ddp" if chosen.base == "nf4" else settings.parallel
        mode, why = choose_mode(elements, replica_budget(device), wanted)
        reasons.append(why)
        check_combination(chosen, sharded=mode == "fsdp")
    if conversations_in(spec.data) == "packed":
        check_packing(model)  # in fp32
    if settings.param_dtype == "bf16":
        cast_parameters(model, torch.bfloat16)
    return Built(model if mode == "fsdp" else model.to(device), mode, reasons)


def open_data(chosen: Chosen, model: nn.Module, stop: threading.Event | None = None) -> TrainingSet:
    """Return the run's training set on this machine, whose tokens the model knows. Raises DataError, ModelError and, if
    `stop` is set while data are prepared or fetched, Stopped."""
    spec, settings = chosen.spec, chosen.settings
    check = partial(check_vocabulary, model)
    data = open_training_set(spec.with_source(settings.data), check=check, stop=stop, shards=shard_cache(settings))
    if spec.data.holdout and not data.held_out_tokens:
        warning = "nothing is held out, or less than a sequence of %d tokens: this worker measures no held-out loss"
        log.warning(warning, spec.data.sequence_length)
    return data


def assemble(chosen: Chosen, built: Built, data: TrainingSet) -> Box:
    """Return the run on this machine: the model with its layers as the settings want them, and its inner steps. Raises
    BoxError."""
    spec, settings, device, ranks = chosen.spec, chosen.settings, chosen.device, chosen.ranks
    model, mode, precision = built.model, built.mode, chosen.precision
    use = _device_use(spec, settings, model, precision, device, ranks.size)  # before the layers are replaced
    if precision == "float8":
        log.info("%d linear layers compute in float8", use_float8(model))
        if not settings.compile:
            log.warning("--precision float8 saves time only with --compile")
    head = find_head(model)
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    if settings.compile:
        head = compile_model(model, head, device)
    loss = Loss(model, precision, head, conversations_in(spec.data))
    if mode == "fsdp":
        shard(model)
    if mode is not None:
        loss = distribute(loss, mode, device)
    trained = (each for each in model.parameters() if each.requires_grad)
    offloaded = HostGradients(trained) if settings.offload else None
    optimizers = build_inner_optimizers(model, spec.inner, moments(spec, settings, mode), offloaded)
    sizes, why = _micro_batches(spec, settings, model, loss, device, ranks.size)
    reasons = [*built.reasons, why]
    log.info("%s", "; ".join(reasons))

    def measured(tokens: int) -> Callable[[], EvaluationReport] | None:
        return partial(evaluate, model, data, tokens, device, loss, sizes) if data.held_out_tokens else None

    return Box(
        spec=spec,
        settings=settings,
        device=device,
        precision=precision,
        base=chosen.base,
        frozen=summary_of_frozen(model, spec.model, chosen.base) if chosen.base == "nf4" else None,
        data=data,
        model=model,
        optimizers=optimizers,
        schedule=Schedule(spec, optimizers),
        step=InnerStep(
            loss, optimizers, sizes, inner=spec.inner, scaler=loss_scaler(precision, device), offloaded=offloaded
        ),
        micro_batches=sizes,
        use=use,
        ranks=ranks,
        logs=settings.step_log is not None,
        reasons=reasons,
        evaluate=measured(spec.evaluation.max_tokens),
        probe=measured(min(spec.evaluation.max_tokens, PROBE_TOKENS)),
    )


def base_of(spec: RunSpec, wanted: Base | None) -> Base:
    """Return how this box holds the run's frozen model. `wanted`: --lora-base. Raises BoxError if it was given for a
    run without adapters."""
    if spec.model.lora is not None:
        return wanted or spec.model.lora.base
    if wanted is not None:
        raise BoxError(
            f"--lora-base {wanted} is for the frozen model of adapters, and the run {spec.name} has no [model.lora]: "
            "leave it out"
        )
    return "full"


_PREFIX, _INSIDE = "base_model.model.", ".base_layer."  # what peft adds to the names of a model's parameters


def summary_of_frozen(model: nn.Module, spec: ModelSpec, base: Base) -> FrozenSummary | None:
    """Return the digest and size of the frozen parameters of `model`, from `build_model` with this `base`. It is that
    of the weights in `model.pretrained`, so workers with the model in fp32 and in 4 bits can share a run.

    For a model in 4 bits, the weights are read from their files, one tensor at a time. Raises ModelError if they have
    other names there.
    """
    if base == "full":
        return frozen_summary(model)
    assert spec.pretrained is not None
    trained = Pretrained(spec.pretrained, spec.revision)
    names = list(frozen_parameters(model))
    sources = [name.removeprefix(_PREFIX).replace(_INSIDE, ".") for name in names]
    return summary_of(zip(names, trained.tensors(sources), strict=True))


def check_suited(spec: RunSpec, processes: int) -> None:
    """Raise DataError or BoxError if `outerstep worker` cannot train the run at all in this many processes."""
    if spec.data.source == "custom":
        raise DataError(f"the run {spec.name} has data.source = 'custom': its workers are scripts that use DiLoCo")
    if spec.inner.batch_size % processes:
        raise BoxError(
            f"the run's batch of {spec.inner.batch_size} sequences cannot be divided by {processes} processes: "
            "start a number of processes that divides it"
        )


def shard_cache(settings: BoxSettings) -> CacheSettings:
    """Return where this machine keeps shards of token sets behind a URL, and for how many bytes."""
    return CacheSettings(settings.data_cache or cache_directory("shards"), int(settings.data_cache_gb * 1e9))


def _device_use(
    spec: RunSpec, settings: BoxSettings, model: nn.Module, precision: Precision, device: torch.device, devices: int
) -> DeviceUse:
    """Return what the MFU is computed from, with the peak of all `devices`. FLOPs are only counted if there is a peak
    to compare them with."""
    peak = settings.peak_flops
    if peak is None and device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        peak = peak_flops(name, precision)
        if peak is None:
            log.info("the peak of %s is unknown, so the MFU is not reported; give it with OUTERSTEP_PEAK_FLOPS", name)
    length = spec.data.sequence_length
    if peak is None:
        return DeviceUse(device)
    where = next(model.parameters()).device
    return DeviceUse(device, flops_per_token(model, length, precision, where), peak * devices)


def moments(spec: RunSpec, settings: BoxSettings, mode: Mode | None) -> Held | None:
    """Return how the inner optimizers hold their moments; None: as torch or the user's code does."""
    held: Held = settings.optimizer_state or settings.param_dtype
    if held == settings.param_dtype == "fp32" and not settings.offload:
        return None
    if spec.inner.optimizer not in OPTIMIZERS:
        why = f"the run's inner.optimizer is {spec.inner.optimizer!r}, code that holds its moments as it does"
    elif mode == "fsdp":
        why = "the model is sharded, and so are the moments"
    else:
        return held
    log.warning("%s: with --param-dtype bf16, its steps are rounded to the nearest, which loses small updates", why)
    return None


def _micro_batches(
    spec: RunSpec, settings: BoxSettings, model: nn.Module, loss: Loss, device: torch.device, ranks: int
) -> tuple[MicroBatches, str]:
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    counts = vocabulary if device.type == "cpu" and loss.head is None else None
    logits_bytes = counts and 4 * counts * spec.data.sequence_length
    return choose_micro_batch(settings.micro_batch, spec.inner.batch_size // ranks, ranks, logits_bytes)
