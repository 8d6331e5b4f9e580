"""The layers of a model of which nothing is known."""

from torch import nn


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of its longest list; none where there is no list of two or more."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    layers: list[nn.Module] = list(max(lists, key=len, default=()))
    return layers if len(layers) > 1 else []
