"""The arithmetic of a training step, for the model FLOPs utilisation."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from worker.inner.micro_batch import is_out_of_memory
from worker.inner.precision import Precision, autocast
from worker.models.building import logits_of


def flops_per_token(model: nn.Module, length: int, precision: Precision, device: torch.device) -> float | None:
    """Return the FLOPs per token of a forward and backward pass over sequences of `length`, as torch counts them on
    one: its matrix products and its attention, of which a causal mask saves none (PaLM, arXiv 2204.02311, appendix B).

    To be asked before activations are checkpointed or the model is compiled: what is done twice does not count. None
    where not even this one sequence fits into the memory.
    """
    was_training = model.training
    model.eval()
    tokens = torch.zeros(1, length, dtype=torch.int64, device=device)
    try:
        with FlopCounterMode(display=False) as counter, autocast(precision, device):
            logits_of(model, tokens).float().sum().backward()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return None
    finally:
        model.zero_grad(set_to_none=True)
        model.train(was_training)
    return float(counter.get_total_flops()) / length
