"""The defaults of a run spec that depend on what it trains. A run keeps those that it began with."""

from typing import Any

from protocol.spec.presets import PRESETS

LEAST_RATE, LARGEST_RATE = 4e-4, 8e-3
RATE_BY_WIDTH = 0.4  # times 1 / hidden_size; measured at a width of 64: docs/log.md


def inner_by_the_model(model: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of [inner] whose defaults are others with this [model]: one that is trained from scratch, and
    whose matrices can be told, has Muon, and a learning rate for its width. docs/convergence.md has what they gain."""
    shape = PRESETS.get(str(model.get("preset"))) or model.get("config")
    if not isinstance(shape, dict):
        return {}
    width = shape.get("hidden_size")
    if not isinstance(width, int) or width < 1:
        return {"optimizer": "muon"}
    return {"optimizer": "muon", "learning_rate": min(max(RATE_BY_WIDTH / width, LEAST_RATE), LARGEST_RATE)}
