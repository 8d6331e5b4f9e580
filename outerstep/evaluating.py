"""The held-out loss of a checkpoint or an export, by the worker's own code. Importing this needs torch and
transformers."""

from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from protocol.messages import DataSummary, Evaluation, RunDetail
from protocol.spec.model import MAX_PARAMETERS
from protocol.spec.run import RunSpec, parse_spec
from worker.allowing import permit_factory
from worker.box import shard_cache
from worker.data.open_training_set import open_training_set
from worker.data.tokens.index import described
from worker.data.tokens.tokenizer import IN_BYTES
from worker.data.training_set import TrainingSet
from worker.errors import DataError, ModelError
from worker.export import load_checkpoint
from worker.inner.evaluation import evaluate
from worker.inner.micro_batch import MicroBatches
from worker.link.client import Client
from worker.models.building import build_model, check_vocabulary
from worker.models.pretrained import ADAPTERS, CONFIG
from worker.settings import BoxSettings
from worker.starting import choose_device
from worker.state.parameters import frozen_summary

HOST = torch.device("cpu")
TOKENS_AT_ONCE = 4096  # a whole batch of a run may be half a million, whose logits no machine has room for


def evaluate_model(
    http: httpx.Client,
    token: str,
    run: RunDetail,
    box: BoxSettings,
    *,
    state: int | None = None,
    exported: Path | None = None,
) -> Evaluation:
    """Return the loss on at most `evaluation.max_tokens` of what is held out of the data: of the run's model before
    round `state` (None: the latest checkpoint), or of an export.

    Of `box` count the device, the data and their cache, and the code that is allowed. Where it names no data,
    `data.source` has to hold what the run is trained on. Raises NotAllowed, DataError, ModelError, ValueError for a
    device that this machine lacks, and otherwise what `worker.export.load_checkpoint` raises.
    """
    logging.disable_progress_bar()
    device = choose_device(box.device)
    data = held_out_data(run, box)
    client = Client(http, run.name, token)
    if exported is None:
        model = load_checkpoint(client, state, box.allow_factory, box.max_parameters)
    else:
        model = load_export(exported, run, box.allow_factory, box.max_parameters)
    check_vocabulary(model, data.vocabulary)
    check_finite(model)
    sizes = MicroBatches(None, max(TOKENS_AT_ONCE // run.spec.data.sequence_length, 1))
    report = evaluate(model.to(device), data, run.spec.evaluation.max_tokens, device, micro_batches=sizes)
    return Evaluation(**report.model_dump())


def held_out_data(run: RunDetail, box: BoxSettings) -> TrainingSet:
    """Return the data of the run, or those that `box` names. Raises DataError if they are not there, have ids by
    another tokenizer than the run's, are not the run's though none were named, or if nothing of them is held out."""
    spec = run.spec.with_source(box.data)
    if spec.data.source == "custom":
        raise DataError(f"the run {run.name} has data.source = 'custom', which its scripts alone can read; give --data")
    data = open_training_set(spec, shards=shard_cache(box))
    _check_tokenizer(run, spec.data.source, data.summary)
    known = None if run.data is None else run.data.digest
    if box.data is None and known not in (None, data.summary.digest):
        raise DataError(
            f"data.source = {spec.data.source!r} holds other text on this machine (BLAKE3 {data.summary.digest}) than "
            f"the run is trained on ({known}); give --data to evaluate on other text"
        )
    if next(data.held_out_batches(1), None) is None:
        raise DataError(
            f"of data.source = {spec.data.source!r} nothing is held out, or less than one sequence of "
            f"{spec.data.sequence_length} tokens; give --data with more"
        )
    return data


def _check_tokenizer(run: RunDetail, source: str, ours: DataSummary) -> None:
    """Raise DataError for ids of another tokenizer than the run's; of a script's own data nobody knows it."""
    theirs = run.data
    if theirs is None or run.spec.data.source == "custom" or theirs.tokenizer_digest == ours.tokenizer_digest:
        return
    here, there = (described(each.tokenizer or IN_BYTES, each.tokenizer_digest) for each in (ours, theirs))
    raise DataError(
        f"data.source = {source!r} has token ids by {here}, the run {run.name} is trained on those by {there}, to "
        "which they are other text; give --data by that tokenizer, as `outerstep data prepare` makes it"
    )


def load_export(
    directory: Path,
    run: RunDetail | None = None,
    factories: tuple[str, ...] = (),
    max_parameters: int = MAX_PARAMETERS,
) -> nn.Module:
    """Return the model of a directory that `outerstep run export` has written, on the CPU; of adapters, what they make
    with the model that they belong to. Of code that makes the model, that of `factories` may be run. Raises NotAllowed,
    and ModelError, also where `run` trains adapters on another model than that
    one."""
    try:
        if (directory / CONFIG).is_file():
            model = _transformers_model(directory)
        else:
            spec = parse_spec((directory / "spec.toml").read_text())
            permit_factory(spec, factories)
            model = build_model(spec, HOST, max_parameters)
            if (directory / ADAPTERS).is_file():
                if run is not None:
                    _check_base(run, spec, model, directory)
                model = _with_adapters(model, directory)
            else:
                load_model(model, directory / "model.safetensors")
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{directory} is not what `outerstep run export` writes: {error}") from error
    return model.float().eval()


def _transformers_model(directory: Path) -> nn.Module:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False, use_safetensors=True, output_loading_info=True
    )
    model: nn.Module = loaded[0]
    if missing := sorted(loaded[1]["missing_keys"]):  # transformers draws them at random
        raise ValueError(f"its weights lack {len(missing)} tensors of the model, {missing[0]} for one")
    return model


def _check_base(run: RunDetail, spec: RunSpec, model: nn.Module, directory: Path) -> None:
    """Raise ModelError if the adapters of `spec` belong to another model, here, than those that `run` trains."""
    ours, theirs = spec.model, run.spec.model
    if ours.lora is None or theirs.lora is None:
        return
    if run.frozen is None or ours.lora.target_modules != theirs.lora.target_modules:  # which names in the digest follow
        here, there = ((each.pretrained, each.revision) for each in (ours, theirs))
        same, told = here == there, f"that is {here}, and not {there}"
    else:
        frozen = frozen_summary(model)
        same, told = frozen == run.frozen, f"its frozen parameters here are {frozen}, and not {run.frozen}"
    if not same:
        raise ModelError(
            f"the adapters in {directory} belong to model.pretrained = {ours.pretrained!r}, which is not the model "
            f"that the run {run.name} trains adapters on: {told}; load the weights that its workers have, or evaluate "
            "its own export"
        )


def _with_adapters(model: Any, directory: Path) -> nn.Module:
    """Return what the adapters in the directory make with `model`, which peft has wrapped."""
    import peft  # it is here: `model` is built by it

    tensors = load_file(directory / "adapter_model.safetensors")
    if tensors.keys() != peft.get_peft_model_state_dict(model, save_embedding_layers=False).keys():
        raise ValueError("adapter_model.safetensors has not the adapters that spec.toml describes")
    peft.set_peft_model_state_dict(model, tensors)
    merged: nn.Module = model.merge_and_unload()
    return merged


def check_finite(model: nn.Module) -> None:
    """Raise ModelError if a parameter of the model has values that are no finite numbers."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ModelError(f"the tensor {name} of the model has values that are not finite: it has no loss")
