"""Load a model with its linear layers in 4 bits (QLoRA, arXiv 2305.14314, section 3), tensor by tensor.

The model is built without memory for its parameters. Then each tensor is read from its file, quantised, and dropped: so
never more than one of them is in memory in full, while transformers would map all files at once.
"""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert

from worker.process import give_back_free_memory


def empty_in_4_bits(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """Return the model with layers for NF4 with double quantisation, bf16 compute, and its parameters on torch's meta
    device. Its embeddings, its head and its norms are in bf16."""
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.bfloat16, trust_remote_code=False
        )
    model = replace_with_bnb_linear(model, get_keys_to_not_convert(model), nf4)
    model.is_loaded_in_4bit = True  # for peft
    for layer in model.modules():
        # bitsandbytes would repack the weights for some CPUs at each evaluation, and fail with odd shapes.
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    loaded: PreTrainedModel = model.eval()
    return loaded


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
    return is_in_4_bits(getattr(module, "weight", None)) and getattr(module, "source_cls", None) is Conv1D
