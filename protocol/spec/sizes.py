"""How large a model may be, as far as a spec says.

A spec is somebody else's text. sections.py bounds each of its numbers; the size of a model is a product of several.
"""

from typing import Any

# Of a model that a worker builds, unless its owner allows more: --max-parameters.
MOST_PARAMETERS = 20_000_000_000
MOST_LAYERS = 4096

# What configurations of transformers call their number of layers, and their width.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")
WIDTHS = ("hidden_size", "n_embd", "d_model")


def check_layers(config: dict[str, Any]) -> None:
    """Raise ValueError for a configuration with more layers than any model has, in a part of it too."""
    for key, value in config.items():
        if key in LAYERS and isinstance(value, int) and value > MOST_LAYERS:
            raise ValueError(f"config.{key} = {value:,}: at most {MOST_LAYERS:,} layers are allowed")
        if isinstance(value, dict):
            check_layers(value)


def least_parameters(config: dict[str, Any]) -> int:
    """Return a lower bound of the parameters of a model with this configuration, as far as its layers and width are in
    it: each layer has at least one square matrix for its queries or its outputs."""
    layers, width = (
        max((config[key] for key in keys if isinstance(config.get(key), int)), default=0) for keys in (LAYERS, WIDTHS)
    )
    return max(layers, 1) * max(width, 0) ** 2
