"""Whether a run's model fits into this machine's free memory, and `--fit auto`: the settings with which it does.

A worker that is restarted keeps what it chose first, whatever is free now: its snapshot has the moments in that form.
"""

import importlib.util
import json
import logging
from pathlib import Path
from typing import TypeVar

import torch

from outerstep.common.files import replace_file
from outerstep.common.quantities import bytes_text, count_text
from protocol.spec.run import RunSpec
from protocol.spec.sections import OPTIMIZERS
from worker.accounts.machine import free_memory
from worker.errors import BoxError
from worker.memory import LIBRARIES_BYTES, PARAMETER_BYTES, ROOM, Need, Settings, need_of, needs
from worker.models.building import sizes_of
from worker.ranks import ALONE, Ranks
from worker.settings import BoxSettings

CHOICE = "fit.json"  # in the state directory
_CHOSEN = ("param_dtype", "optimizer_state", "offload", "lora_base", "activation_checkpointing")

log = logging.getLogger(__name__)

Box = TypeVar("Box", bound=BoxSettings)


def fitted(
    spec: RunSpec, settings: Box, device: torch.device, ranks: Ranks = ALONE, state_dir: Path | None = None
) -> Box:
    """Return `settings` with the first of worker/memory.py that suits them, fits, and is as given where it was given;
    log which. Activations are checkpointed unless the defaults fit. Without --fit, return `settings`.

    If `state_dir` has a snapshot and the choice that was made for it, that choice is kept if it suits them.

    Raises BoxError if none fits, or the sizes are unknown, and ModelError for a model that cannot be built.
    """
    if settings.fit is None:
        return settings
    if ranks.size > 1:
        raise BoxError("--fit auto is for a single process: several share a model as --parallel says")
    if spec.model.factory is not None:
        raise BoxError("--fit auto cannot know the size of a model from model.factory: give the settings yourself")
    before = None if state_dir is None else _choice_in(state_dir, settings)
    if before is not None and _suits(_settings_of(before), settings, spec):
        kept = f"as when this worker was started first ({state_dir}/{CHOICE})"
        log.info("--fit auto: %s, %s", chosen_options(before), kept)
        return before
    sizes, (memory, host) = sizes_of(spec, settings.max_parameters), free_memory(device)
    on_gpu = device.type == "cuda"
    if memory is None or (on_gpu and host is None):
        raise BoxError("--fit auto: this system does not report its free memory; give the settings yourself")
    suitable = [each for each in needs(sizes, on_gpu=on_gpu) if _suits(each.settings, settings, spec)]
    found = next((each for each in suitable if each.fits(memory, host)), None)
    what = f"{count_text(sizes.trained)} parameters to train" + (
        f" and {count_text(sizes.frozen)} frozen" if sizes.frozen else ""
    )
    free = f"{bytes_text(memory)} are free on {device}" + (f", {bytes_text(host)} in host memory" if host else "")
    if not suitable:
        raise BoxError(
            f"--fit auto cannot choose on {device}: no combination of settings goes with the options given and "
            "the run's optimizer; leave out --offload, --param-dtype, --optimizer-state, --precision or --lora-base"
        )
    if found is None:
        raise BoxError(
            f"--fit auto: nothing fits for {what}: {free}, of which {ROOM:.0%} may be used; the least would need "
            f"{_text(suitable[-1])}. Stop other programs, use several GPUs (--gpus N), or train adapters with a frozen "
            "model in 4 bits"
        )
    chosen = found.settings
    complete = settings.model_copy(
        update={
            "fit": None,
            "param_dtype": chosen.param_dtype,
            "optimizer_state": None if chosen.moments == chosen.param_dtype else chosen.moments,
            "offload": chosen.offload,
            "lora_base": chosen.lora_base if spec.model.lora is not None else settings.lora_base,
            "activation_checkpointing": bool(chosen.options) or settings.activation_checkpointing,
        }
    )
    log.info("--fit auto: %s: %s, with %s; %s", what, chosen_options(complete), _text(found), free)
    return complete


# Moments per trained parameter, at least: Muon has one for the hidden matrices, a user's optimizer any number.
_MOMENTS = {"adamw": 2, "muon": 1}


def need_here(spec: RunSpec, settings: BoxSettings, device: torch.device) -> Need | None:
    """Return what the run's model needs at least with these settings; None if its size is unknown before it is built.
    Raises ModelError."""
    if spec.model.factory is not None or not spec.model.is_given:
        return None
    sizes, moments = sizes_of(spec, settings.max_parameters), _MOMENTS.get(spec.inner.optimizer, 0)
    return need_of(sizes, _settings_of(settings), on_gpu=device.type == "cuda", moments_each=moments)


def check_memory(need: Need, device: torch.device, processes: int, shards: int, *, in_host_memory: bool) -> str:
    """Return what is needed and what is free, in words. Raises BoxError if there is too little, before gigabytes are
    loaded; activations are not counted.

    processes       of this worker
    shards          into which the model is cut at most: 1 for replicas
    in_host_memory  each process assembles the whole model there first, in fp32
    """
    beside, (free, free_on_host) = need.host - LIBRARIES_BYTES, free_memory(device)
    training = need.device if need.on_gpu else need.device - need.host
    assembled = processes * need.parameters * 4 // PARAMETER_BYTES[need.settings.param_dtype] if in_host_memory else 0
    if need.on_gpu:
        places = [(f"on {device}", training // shards, free), ("in host memory", max(beside, assembled), free_on_host)]
    else:
        places = [("in memory", max(processes * training // shards + beside, assembled), free)]
    said = (
        f"parameters {bytes_text(need.parameters)}, gradients {bytes_text(need.gradients)}, "
        f"moments {bytes_text(need.moments)}, outer state and work to send "
        f"{bytes_text(need.outer_state + need.work)}; "
        + ", ".join(f"{bytes_text(size)} {where} ({bytes_text(free)} free)" for where, size, free in places)
        + ", and activations"
    )
    if any(free is not None and size > free for _, size, free in places):
        raise BoxError(
            f"the model does not fit into memory: {said}; use --fit auto, --gpus N with --parallel fsdp, or a machine "
            "with more"
        )
    return said


def keep_choice(state_dir: Path, chosen: BoxSettings) -> None:
    """Keep what --fit auto has chosen for the worker's next start. Raises OSError."""
    document = json.dumps(chosen.model_dump(include=set(_CHOSEN)))
    replace_file(state_dir / CHOICE, lambda file: file.write(document.encode()), 0o600)


def _choice_in(state_dir: Path, settings: Box) -> Box | None:
    """Return `settings` with the choice that was made for the snapshot in this directory; None if there is none."""
    path = state_dir / CHOICE
    if not path.exists() or not any(state_dir.glob("*.pt")):
        return None
    try:
        kept = json.loads(path.read_text())
        chosen = {name: kept[name] for name in _CHOSEN} | {"fit": None}
        chosen["activation_checkpointing"] |= settings.activation_checkpointing
        return type(settings).model_validate(settings.model_dump(exclude_unset=True) | chosen)
    except (OSError, ValueError, LookupError, TypeError) as error:
        log.warning("%s is damaged (%s): --fit auto chooses again", path, type(error).__name__)
        return None


def _settings_of(settings: BoxSettings) -> Settings:
    moments = settings.optimizer_state or settings.param_dtype
    return Settings(settings.param_dtype, moments, settings.offload, settings.lora_base or "full")


def chosen_options(settings: BoxSettings) -> str:
    """Return the options that --fit auto has chosen, in words."""
    held = _settings_of(settings).options
    lean = "--activation-checkpointing" if settings.activation_checkpointing else ""
    return " ".join(filter(None, [held, lean])) or "the defaults"


def _text(need: Need) -> str:
    host = f" and {bytes_text(need.host)} in host memory" if need.on_gpu else ""
    return f"{bytes_text(need.device)}{host}"


def _suits(each: Settings, given: BoxSettings, spec: RunSpec) -> bool:
    """Return True if a worker can train the run that way, and `given` says nothing else."""
    if "param_dtype" in given.model_fields_set and given.param_dtype != each.param_dtype:
        return False
    if given.optimizer_state not in (None, each.moments) or (given.offload and not each.offload):
        return False
    wanted = given.lora_base or ("nf4" if spec.model.lora is not None and spec.model.lora.base == "nf4" else None)
    if wanted not in (None, each.lora_base) or (each.lora_base == "nf4" and wanted is None and not _has_bitsandbytes()):
        return False
    if each.param_dtype == "bf16" and given.precision not in (None, "bf16", "float8"):
        return False
    if each.lora_base == "nf4" and given.precision not in (None, "bf16"):
        return False
    own_moments = each.offload or each.moments != each.param_dtype
    return not (own_moments and spec.inner.optimizer not in OPTIMIZERS) and not (each.offload and given.compile)


def _has_bitsandbytes() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None
