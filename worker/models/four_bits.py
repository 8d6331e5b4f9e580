"""Load a model with its linear layers in 4 bits (QLoRA, arXiv 2305.14314, section 3), tensor by tensor.

The model is built without memory for its parameters. Then each tensor is read from its file, quantised, and dropped: so
never more than one of them is in memory in full, while transformers would map all files at once.
"""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import init_empty_weights
from bitsandbytes.nn.modules import Linear4bit
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from worker.process import give_back_free_memory


def empty_in_4_bits(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Return the model with its parameters on torch's meta device. Its linear layers, except the output embeddings, are
    for NF4 with double quantisation and compute in bf16; its embeddings, its head and its norms are in bf16."""
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.bfloat16, trust_remote_code=False
        )
    head = model.get_output_embeddings()
    linear = {name: each for name, each in model.named_modules() if type(each) in (nn.Linear, Conv1D)}
    for name, layer in linear.items():
        if layer is not head:
            model.set_submodule(name, _layer_in_4_bits(layer))
    model.is_loaded_in_4bit = True  # for peft
    loaded: PreTrainedModel = model.eval()
    return loaded


def _layer_in_4_bits(layer: Any) -> nn.Module:
    """Return a layer without weights in place of `layer`, a Linear or transformers' Conv1D."""
    rows, columns = layer.weight.shape
    given, made = (columns, rows) if isinstance(layer, nn.Linear) else (rows, columns)
    with torch.device("meta"):
        new: Any = Linear4bit(
            given, made, layer.bias is not None, torch.bfloat16, compress_statistics=True, quant_type="nf4"
        )
    new.requires_grad_(False)
    new.is_transposed = isinstance(layer, Conv1D)
    # bitsandbytes would repack the weights for some CPUs at each evaluation, and fail with odd shapes.
    new.support_avx512bf16_for_cpu = False
    made_empty: nn.Module = new
    return made_empty


def fill(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Give `model`, from `empty_in_4_bits`, all of its parameters and persistent buffers, on `device`. The tensors come
    with their names in the model; each may be gone once the next one is asked for. The largest should come first."""
    for name, tensor in tensors:
        module, leaf = _owner(model, name)
        old = getattr(module, leaf)
        if is_in_4_bits(old):
            value = (tensor.T if _is_transposed(module) else tensor).to(device, torch.bfloat16).contiguous()
            new = type(old)(value, requires_grad=False, **vars(old)).to(device)
            give_back_free_memory()  # on a CPU, quantising takes several times the tensor's memory
        else:
            new = tensor.to(device, torch.bfloat16 if tensor.is_floating_point() else None, copy=True)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, requires_grad=False)
        setattr(module, leaf, new)
    model.tie_weights()
    nn.Module.to(model, device)  # its buffers


def shapes(model: PreTrainedModel) -> dict[str, list[int]]:
    """Return the shapes of the tensors that `fill` needs, by name."""
    tied = model.all_tied_weights_keys
    wanted = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return {
        name: list(reversed(tensor.shape) if _is_transposed(_owner(model, name)[0]) else tensor.shape)
        for name, tensor in wanted.items()
    }


def is_in_4_bits(parameter: object) -> bool:
    """Return True for a parameter of bitsandbytes that is in 4 bits, or will be."""
    return hasattr(parameter, "quant_type")


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    where, _, leaf = name.rpartition(".")
    return model.get_submodule(where), leaf


def _is_transposed(module: nn.Module) -> bool:
    """Return True for a layer that was transformers' Conv1D, a linear layer whose weight is [in, out]."""
    return bool(getattr(module, "is_transposed", False))
