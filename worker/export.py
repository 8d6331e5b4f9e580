"""Export of a checkpoint as a Hugging Face directory, and samples of text from the model."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from outerstep.common.files import check_new, check_room, new_directory
from protocol.messages import RunDetail
from protocol.spec.model import BYTES, MAX_PARAMETERS, ModelSpec
from worker.allowing import permit_factory
from worker.data.tokens.tokenizer import IN_BYTES, Tokenizer, load_tokenizer
from worker.errors import DataError, ModelError
from worker.joining.checkpoints import load_bare_parameters, load_parameters
from worker.link.client import Client
from worker.models.building import build_model, logits_of
from worker.state.parameters import own_buffers

_HOST = torch.device("cpu")
TEMPERATURE = 0.8

log = logging.getLogger(__name__)


def load_checkpoint(
    client: Client,
    state_round: int | None = None,
    factories: tuple[str, ...] = (),
    max_parameters: int = MAX_PARAMETERS,
    average: int = 1,
) -> nn.Module:
    """Return the run's model with the parameters of checkpoint `state_round` (None: the latest, see `load_parameters`),
    or the mean of `average` states up to it, on the CPU, for evaluation. Code that makes the model runs only if it is
    in `factories`.

    Raises what `load_parameters` raises, NotAllowed, and ModelError if the model cannot be built here.
    """
    spec = client.run_detail().spec
    permit_factory(spec, factories)
    model = build_model(spec, _HOST, max_parameters)
    load_parameters(client, model, state_round, average)
    return model.eval()


def export(
    client: Client,
    directory: Path,
    state_round: int | None = None,
    *,
    merge: bool = False,
    factories: tuple[str, ...] = (),
    max_parameters: int = MAX_PARAMETERS,
    average: int = 1,
) -> nn.Module:
    """Write checkpoint `state_round` (None: the latest), or the mean of `average` states up to it, into `directory`,
    new or empty. Return the model.

    A transformers model becomes a directory that `AutoModelForCausalLM.from_pretrained` loads. Adapters are written as
    peft does it, or with `merge` merged into the model they belong to. A model from the user's own function becomes
    model.safetensors and the run's spec.toml, and so do the trained parameters alone if the spec does not describe the
    model; a script's peft adapters become adapter_model.safetensors. The run's tokenizer is written too, or a warning
    if this machine does not have it. If writing fails, nothing is left in `directory`. Raises FileExistsError, OSError,
    ModelError if there is nothing to merge, and what `load_checkpoint` raises.
    """
    check_new(directory)
    run = client.run_detail()
    adapted = run.spec.model.lora is not None
    if merge and not adapted:
        raise ModelError(f"the run {run.name} has no adapters to merge: its export is the whole model")
    load = partial(load_checkpoint, factories=factories) if run.spec.model.is_given else load_bare_parameters
    load = partial(load, max_parameters=max_parameters, average=average)
    model, tokenizer = load(client, state_round), tokenizer_of(run)
    _name_special_tokens(model, run.spec.model, tokenizer)
    if buffers := own_buffers(model):
        log.warning(
            "%d buffers, such as %s, have their initial values: the run does not average them; for a batch "
            "normalisation, measure them with torch.optim.swa_utils.update_bn",
            *(len(buffers), buffers[0]),
        )
    if merge:
        model = model.merge_and_unload()  # type: ignore[operator]
    check_room(directory, sum(each.nbytes for each in model.parameters() if each.requires_grad or not adapted or merge))
    with new_directory(directory) as new:
        if tokenizer is not None:
            tokenizer.save(new)
        if adapted and not merge:
            # Not the embedding: peft would ask the hub whether its size is that of the original model.
            model.save_pretrained(new, save_embedding_layers=False)  # type: ignore[operator]
        elif isinstance(model, PreTrainedModel):
            _cache(model)
            model.save_pretrained(new)
        elif (adapters := _named_as_by_peft(model)) is not None:
            save_file(adapters, new / "adapter_model.safetensors")
            log.warning(
                "the export has the adapters of a script, and the run does not know their configuration: copy the "
                "adapter_config.json that the script's model.save_pretrained() writes to %s before peft loads it",
                directory,
            )
        else:
            save_model(model, str(new / "model.safetensors"))
        (new / "spec.toml").write_text(client.spec_text())
        for file in new.glob("*.safetensors"):  # safetensors makes them readable by their owner only
            file.chmod((new / "spec.toml").stat().st_mode)
    return model


def _named_as_by_peft(model: nn.Module) -> dict[str, Tensor] | None:
    """Return the tensors by the names that peft loads, without that of the adapter; None if they are not all of a model
    that peft has wrapped, with its default name for the adapter."""
    tensors = model.state_dict()
    if not all(name.startswith("base_model.model.") and ".default" in name for name in tensors):
        return None
    return {
        name.replace(".modules_to_save.default", "").replace(".default", ""): tensor.contiguous()
        for name, tensor in tensors.items()
    }


def tokenizer_of(run: RunDetail) -> Tokenizer | None:
    """Return the tokenizer that the run's spec names; None, with a warning, if this machine does not have it. Bytes
    have a tokenizer too, with nothing to save. What the first worker reports about its data is free text: only the
    digest in it is used."""
    name = run.spec.data.tokenizer
    if name is None and run.data is not None:
        if run.data.tokenizer == IN_BYTES:
            name = IN_BYTES
        elif run.data.tokenizer_digest is not None:
            log.warning(
                "exported without a tokenizer: the run's spec has no data.tokenizer; copy a worker's next to the model "
                "(BLAKE3 %s)",
                run.data.tokenizer_digest,
            )
    try:
        tokenizer = None if name is None else load_tokenizer(name)
        if tokenizer and run.data and tokenizer.digest != run.data.tokenizer_digest:
            raise DataError(
                f"the tokenizer {name} on this machine is not the run's (BLAKE3 {run.data.tokenizer_digest})"
            )
    except DataError as error:
        log.warning("exported without a tokenizer: %s; copy the tokenizer of a worker next to the model", error)
        return None
    return tokenizer


def _name_special_tokens(model: nn.Module, spec: ModelSpec, tokenizer: Tokenizer | None) -> None:
    """Set the ids that end, begin and pad a text to those of the run's `tokenizer`.

    The defaults of a configuration class belong to another tokenizer. So where the tokenizer names no id, as bytes do,
    a model from `model.config` keeps only what the spec gives; trained weights (`model.pretrained`) keep their own.
    """
    config, given = getattr(model, "config", None), spec.config or {}
    if not isinstance(config, PreTrainedConfig):
        return
    if tokenizer is None:
        if spec.config is not None and "eos_token_id" not in given and config.eos_token_id is not None:
            log.warning(
                "the run's tokenizer is not available here: eos_token_id = %s in the export is the default of %s, "
                "and may not be the token that ends a document",
                *(config.eos_token_id, type(config).__name__),
            )
        return
    if spec.config is not None and "eos_token_id" in given and not _is_or_has(given["eos_token_id"], tokenizer.end):
        log.warning(
            "model.config.eos_token_id = %s, but the run's tokenizer ends documents with %s: the export has the latter",
            *(given["eos_token_id"], tokenizer.end),
        )
    for key, token in (
        ("eos_token_id", tokenizer.end),
        ("bos_token_id", tokenizer.begin),
        ("pad_token_id", tokenizer.pad),
    ):
        for each in (config, getattr(model, "generation_config", None)):
            if each is None:
                continue
            present = getattr(each, key, None)
            if key == "pad_token_id" and each is config and present is not None:
                continue  # the model's layers were built with it: positions may start after it
            if token is None and spec.config is not None:
                setattr(each, key, given.get(key))
            elif token is not None and not _is_or_has(present, token):
                setattr(each, key, token)


def _is_or_has(ids: Any, token: int | None) -> bool:
    """Return True if a configuration's `ids`, one or a list, include `token`, or if `token` is None."""
    return token is None or token in (ids if isinstance(ids, list) else [ids])


def _cache(model: PreTrainedModel) -> None:
    """Turn the cache of keys and values on for generation; it is off in training."""
    for config in (model.config, model.generation_config):  # generate() reads only the latter
        if config is not None:
            config.use_cache = True


@torch.no_grad()
def sample(model: nn.Module, prompt: bytes, n: int, generator: torch.Generator) -> bytes:
    """Return `n` bytes sampled from the model after `prompt` (not empty), at temperature 0.8, with a CPU
    `generator`."""
    config = getattr(model, "config", None)
    context = getattr(config, "max_position_embeddings", None) or len(prompt) + n
    device = next(model.parameters()).device
    tokens = list(prompt)
    for _ in range(n):
        window = torch.tensor([tokens[-context:]], device=device)
        logits = logits_of(model, window)[0, -1, :BYTES].float().cpu()
        choice = torch.multinomial(torch.softmax(logits / TEMPERATURE, dim=0), 1, generator=generator)
        tokens.append(int(choice))
    return bytes(tokens[len(prompt) :])
