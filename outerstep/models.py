"""A run's model outside of training: exported, measured, or pinned. Importing this needs torch and transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from protocol.messages import DataSummary
from protocol.spec.model import MAX_PARAMETERS
from protocol.spec.run import RunSpec, parse_spec
from protocol.spec.sections import DataSpec, PinSpec
from worker.allowing import NOTHING, OF_MODEL, Allowed, allowed_by, permit
from worker.box import base_of, check_suited, shard_cache, summary_of_frozen
from worker.data.open_training_set import open_training_set
from worker.data.tokens.index import described
from worker.data.tokens.tokenizer import IN_BYTES
from worker.data.training_set import TrainingSet
from worker.errors import DataError, ModelError
from worker.export import export
from worker.inner.loss import Loss, check_packing, conversations_in
from worker.inner.micro_batch import MicroBatches
from worker.link.client import Client
from worker.models.building import build_model, check_vocabulary
from worker.models.pretrained import ADAPTERS, CONFIG
from worker.settings import BoxSettings
from worker.state.fragments import Fragments
from worker.state.outer_state import OuterState
from worker.state.parameters import tensor_specs

HOST = torch.device("cpu")
TOKENS_AT_ONCE = 4096  # a run's whole batch may have half a million tokens, whose logits fit on no machine


# --- evaluation ---------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, data: TrainingSet, described: DataSpec, device: torch.device) -> Loss:
    """Return the model's loss on data that `described` describes, on `device`. Raises ModelError if the model cannot
    be evaluated on them."""
    check_vocabulary(model, data.vocabulary)
    check_finite(model)
    conversations = conversations_in(described)
    if conversations == "packed":
        if (config := getattr(model, "config", None)) is not None:
            config.use_cache = False  # with a cache, transformers takes a sequence for one conversation
        check_packing(model)
    return Loss(model.to(device), conversations=conversations)


def micro_batches(described: DataSpec) -> MicroBatches:
    return MicroBatches(None, max(TOKENS_AT_ONCE // described.sequence_length, 1))


def held_out_data(spec: RunSpec, box: BoxSettings, name: str, recorded: DataSummary | None) -> TrainingSet:
    """Return the data of the spec, or those that `box` names. `name` is that of the run, or of its export; `recorded`
    is what the coordinator knows of the run's data, None if nothing. Raises DataError if they are missing, use another
    tokenizer than the run, are not the run's although `box` names none, or have nothing held out."""
    custom = spec.data.source == "custom"
    spec = spec.with_source(box.data)
    if spec.data.source == "custom":
        raise DataError(f"{name} has data.source = 'custom', which only its scripts can read; give --on")
    data = open_training_set(spec, shards=shard_cache(box))
    if recorded is not None and not custom:  # a script's own tokenizer is unknown
        check_tokenizer(name, recorded, spec.data.source, data.summary)
    known = None if recorded is None else recorded.digest
    if box.data is None and known not in (None, data.summary.digest):
        raise DataError(
            f"data.source = {spec.data.source!r} has other text on this machine (BLAKE3 {data.summary.digest}) than "
            f"{name} is trained on ({known}); give --on to evaluate on other text"
        )
    if next(data.held_out_batches(1), None) is None:
        raise DataError(
            f"data.source = {spec.data.source!r} has nothing held out, or less than one sequence of "
            f"{spec.data.sequence_length} tokens; give --on with more"
        )
    return data


def check_tokenizer(name: str, theirs: DataSummary, source: str, ours: DataSummary) -> None:
    """Raise DataError if `name` is trained on ids of another tokenizer than those of `source`."""
    if theirs.tokenizer_digest == ours.tokenizer_digest:
        return
    here, there = (described(each.tokenizer or IN_BYTES, each.tokenizer_digest) for each in (ours, theirs))
    raise DataError(
        f"data.source = {source!r} has token ids from {here}, but {name} is trained on ids from {there}; "
        "give --on made with that tokenizer, by `outerstep data prepare`"
    )


def load_export(directory: Path, allowed: Allowed, max_parameters: int, ask: Callable[[str], bool] | None) -> nn.Module:
    """Return the model in a directory written by `outerstep run export`, on the CPU; adapters are merged into the model
    that they belong to. Code and places that its spec names must be `allowed`, or the owner says yes to `ask`. Raises
    NotAllowed and ModelError."""
    try:
        if (directory / CONFIG).is_file():
            model = _transformers_model(directory)
        else:
            spec = parse_spec((directory / "spec.toml").read_text())
            permit(spec, allowed, ask, OF_MODEL)
            model = build_model(spec, HOST, max_parameters)
            if (directory / ADAPTERS).is_file():
                model = _with_adapters(model, directory)
            else:
                load_model(model, directory / "model.safetensors")
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{directory} was not written by `outerstep run export`, or is damaged: {error}") from error
    return model.float().eval()


def _transformers_model(directory: Path) -> nn.Module:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False, use_safetensors=True, output_loading_info=True
    )
    model: nn.Module = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):  # transformers would initialise them at random
        raise ValueError(f"its weights lack {len(missing)} tensors of the model, {missing[0]} for one")
    return model


def _with_adapters(model: Any, directory: Path) -> nn.Module:
    """Return `model`, which peft has wrapped, with the directory's adapters merged into it."""
    import peft  # installed, since it built `model`

    tensors = load_file(directory / "adapter_model.safetensors")
    if tensors.keys() != peft.get_peft_model_state_dict(model, save_embedding_layers=False).keys():
        raise ValueError("adapter_model.safetensors does not have the adapters that spec.toml describes")
    peft.set_peft_model_state_dict(model, tensors)
    merged: nn.Module = model.merge_and_unload()
    return merged


def check_finite(model: nn.Module) -> None:
    """Raise ModelError if a parameter of the model has values that are not finite."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ModelError(f"the tensor {name} of the model has values that are not finite: it has no loss")


# --- export -------------------------------------------------------------------------------------------------------


def export_model(
    http: httpx.Client,
    run: str,
    token: str,
    directory: Path,
    state: int | None = None,
    *,
    merge: bool = False,
    allowed: Allowed = NOTHING,
    ask: Callable[[str], bool] | None = None,
    max_parameters: int = MAX_PARAMETERS,
    average: int = 1,
) -> nn.Module:
    """Write checkpoint `state` of `run` (None: the latest), or the mean of `average` states up to it, into `directory`,
    and return the model. `merge`: merge its adapters. Code and places that its spec names must be `allowed`, or the
    owner says yes to `ask`.

    Retries for ever while the coordinator is unreachable. Raises NotAllowed, and what `worker.export.export` raises.
    """
    logging.disable_progress_bar()  # it lasts an instant, and would disturb our own display
    client = Client(http, run, token)
    allowed = permit(client.run_detail().spec, allowed, ask, (*OF_MODEL, "data.tokenizer"))
    return export(
        *(client, directory, state),
        merge=merge,
        factories=allowed.factories,
        max_parameters=max_parameters,
        average=average,
    )


# --- pins ---------------------------------------------------------------------------------------------------------


def pins_of(spec: RunSpec, settings: BoxSettings, *, state: bool) -> PinSpec:
    """Return the digests that the run's workers must match. Builds the run's model in host memory and opens its
    training set. `state`: pin state 0 too, unless it comes from another run.

    Raises NotAllowed, DataError and ModelError, as a worker does at its start, and LayoutError.
    """
    permit(spec, allowed_by(settings))
    check_suited(spec, 1)
    base = base_of(spec, settings.lora_base)
    model = build_model(spec, torch.device("cpu"), settings.max_parameters, base)
    layout = spec.sync.plan_layout(tensor_specs(model))
    frozen = summary_of_frozen(model, spec.model, base)
    digest = None
    if not spec.data.private:
        data = open_training_set(spec.with_source(settings.data), shards=shard_cache(settings))
        digest = data.summary.digest
        data.close()
    held = None
    if state and spec.model.run is None:
        held = OuterState(layout, spec.outer, pin_memory=False)
        held.take(Fragments(model, layout))
    return PinSpec(
        layout=layout.digest().hex(),
        frozen=frozen.digest if frozen else None,
        data=digest,
        state=held.digest().hex() if held else None,
    )
