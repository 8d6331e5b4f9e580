"""The models that ship with Outerstep: configurations of transformers' Llama."""

from typing import Any

BYTES = 256  # token ids of text

# tiny: 139,584 parameters. The others have the shapes of OpenDiLoCo (arXiv 2407.07852, table 1).
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": BYTES,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.08,  # what transformers' default, 0.02, is for a width of 1024
    },
    "llama-150m": {
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 2688,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "rms_norm_eps": 1e-5,
    },
    "llama-1b": {
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
    },
}

# Preset -> the standard deviation of its embeddings' initial values, where it is not that of all matrices. So narrow a
# model wants large rates, and small embeddings are thrown about by them: with 1.0, as torch has it, they move by less
# than a hundredth per step, as those of large models do. docs/log.md has what it is worth.
EMBEDDINGS = {"tiny": 1.0}
