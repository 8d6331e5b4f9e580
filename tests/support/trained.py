"""Trained models for tests: tiny Llamas as `save_pretrained` leaves them."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel


def save_trained(directory: Path, *, seed: int = 7, shard_size: str = "5GB", **changes: Any) -> PreTrainedModel:
    """Write a Llama of 256 token ids with random weights, held in bf16 as the trained models of the hub are, into
    `directory`; return it."""
    shape: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 10,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**shape | changes)).bfloat16()
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model
