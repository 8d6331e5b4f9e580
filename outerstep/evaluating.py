"""The held-out loss of a checkpoint or an export, by the worker's own code. Importing this needs torch and
transformers."""

from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from protocol.messages import Evaluation, RunDetail
from protocol.spec import parse_spec
from worker.agent import choose_device
from worker.data.opening import open_training_set
from worker.data.training_set import TrainingSet
from worker.errors import DataError, ModelError
from worker.export import load_checkpoint
from worker.inner.evaluation import evaluate
from worker.link.client import Client
from worker.models.building import build_model
from worker.models.presets import BYTES

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Asked:
    """What to evaluate: the model of the run before round `state` (None: the latest checkpoint), or that of an export.

    source   where this machine has the data; None: `data.source`, which has to hold what the run is trained on
    device   as for `outerstep worker`
    """

    state: int | None = None
    exported: Path | None = None
    source: str | None = None
    device: str = "auto"


def evaluate_model(http: httpx.Client, token: str, run: RunDetail, asked: Asked) -> Evaluation:
    """Return the loss on at most `evaluation.max_tokens` of what is held out of the data.

    Raises DataError, ModelError, ValueError for a device that this machine lacks, and otherwise what
    `worker.export.load_checkpoint` raises.
    """
    logging.disable_progress_bar()
    device = choose_device(asked.device)
    data = held_out_data(run, asked.source)
    if asked.exported is None:
        model = load_checkpoint(Client(http, run.name, token), asked.state)
    else:
        model = load_export(asked.exported)
    check_finite(model)
    report = evaluate(model.to(device), data, run.spec.evaluation.max_tokens, device)
    return Evaluation(**report.model_dump())


def held_out_data(run: RunDetail, source: str | None) -> TrainingSet:
    """Return the data of the run, or those at `source`. Raises DataError if they are not there, are not the run's
    though no `source` was given, or if nothing of them is held out."""
    spec = run.spec.with_source(source)
    if spec.data.source == "custom":
        raise DataError(f"the run {run.name} has data.source = 'custom', which its scripts alone can read; give --data")
    data = open_training_set(spec)
    known = None if run.data is None else run.data.digest
    if source is None and known not in (None, data.summary.digest):
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


def load_export(directory: Path) -> nn.Module:
    """Return the model of a directory that `outerstep run export` has written, on the CPU. Raises ModelError."""
    try:
        if (directory / "config.json").is_file():
            model: nn.Module = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
        else:
            model = build_model(parse_spec((directory / "spec.toml").read_text()), HOST)
            load_model(model, directory / "model.safetensors")
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{directory} is not what `outerstep run export` writes: {error}") from error
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", BYTES)
    if vocabulary < BYTES:
        raise ModelError(
            f"{directory}: its vocabulary has {vocabulary} tokens; text is read as bytes, which are {BYTES}"
        )
    return model.float().eval()


def check_finite(model: nn.Module) -> None:
    """Raise ModelError if a parameter of the model has values that are no finite numbers."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ModelError(f"the tensor {name} of the model has values that are not finite: it has no loss")
