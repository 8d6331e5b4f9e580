"""Low-rank adapters (LoRA, arXiv 2106.09685) around a model, by peft."""

from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from protocol.spec.model import ModelSpec
from worker.errors import ModelError

if TYPE_CHECKING:
    from peft import PeftModel


def with_adapters(model: PreTrainedModel, spec: ModelSpec, seed: int) -> "PeftModel":
    """Return `model`, frozen, with the adapters of `model.lora`, drawn by `seed` from torch's default generator; at
    first they add nothing. Raises ModelError where peft is not installed or cannot do it."""
    peft, lora = import_peft(), spec.lora
    assert lora is not None
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
    model.name_or_path = spec.pretrained  # what the adapters say that they belong to
    torch.manual_seed(seed)
    try:
        adapted: PeftModel = peft.get_peft_model(model, config, revision=spec.revision)
    except ValueError as error:
        raise ModelError(f"model.lora: peft refuses it: {error}") from error
    return adapted


def import_peft() -> Any:
    """Return peft. Raises ModelError where it is not installed."""
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ModelError(
            f"model.lora needs {error.name}, which is not installed; run: pip install 'outerstep[peft]'"
        ) from error
    return peft
