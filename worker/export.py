"""Export of a checkpoint as a Hugging Face directory, and samples of text from the model."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_model
from torch import nn
from transformers import PreTrainedModel

from protocol import wire
from protocol.fragments import first_difference
from protocol.messages import RunState
from worker.codecs import unpack_payload
from worker.errors import ModelError
from worker.link.client import Client
from worker.models.building import build_model, logits_of
from worker.models.presets import BYTES
from worker.state.fragments import DenseFragments, tensor_specs

_HOST = torch.device("cpu")
TEMPERATURE = 0.8
_PAUSE_S = 0.2
_CONNECTIONS = 4


def load_checkpoint(client: Client, state_round: int | None = None) -> nn.Module:
    """Return the run's model with the parameters of checkpoint `state_round` (None: the latest), on the CPU, for
    evaluation.

    The latest of a finished run is its final state; this waits for it, because the coordinator takes its own last outer
    step a moment after the run has finished. Raises Problem `not-found` for a checkpoint that does not exist, `gone`
    for one that was deleted, ModelError if the model cannot be built here.
    """
    run = client.run_detail()
    while state_round is None and run.state is RunState.FINISHED and run.state_digest is None:
        client.pause(_PAUSE_S)
        run = client.run_detail()
    checkpoint = client.checkpoint(state_round)
    model = build_model(run.spec, _HOST)
    difference = first_difference(checkpoint.layout.tensors, tensor_specs(model))
    if difference:
        raise ModelError(f"the model built here is not the model of the run {client.run}: {difference}")
    fragments = DenseFragments(model, checkpoint.layout)
    with ThreadPoolExecutor(_CONNECTIONS, "export") as connections:
        for p, elements in enumerate(checkpoint.layout.elements):
            limit_bytes = wire.max_payload_bytes("fp32", 2 * elements)
            payload = client.checkpoint_fragment(checkpoint.round, checkpoint.fragments[p], limit_bytes, connections)
            fragments.scatter(p, unpack_payload(payload, _HOST)[:elements])
    return model.eval()


def export(client: Client, directory: Path, state_round: int | None = None) -> nn.Module:
    """Write checkpoint `state_round` (None: the latest) into `directory`, new or empty. Return the model.

    A transformers model becomes a directory that `AutoModelForCausalLM.from_pretrained` loads; a model from
    the user's own function becomes model.safetensors and the run's spec.toml. Raises FileExistsError and what
    `load_checkpoint` raises.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists and is not an empty directory; choose another")
    model = load_checkpoint(client, state_round)
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(model, PreTrainedModel):
        model.config.use_cache = True  # off for training, wanted by whoever generates with it
        model.save_pretrained(directory)
    else:
        save_model(model, str(directory / "model.safetensors"))
    (directory / "spec.toml").write_text(client.spec_text())
    return model


@torch.no_grad()
def sample(model: nn.Module, prompt: bytes, n: int, generator: torch.Generator) -> bytes:
    """Return `n` bytes sampled from the model after `prompt` (not empty), at temperature 0.8, by a CPU `generator`."""
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
