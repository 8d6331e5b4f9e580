"""Outerstep: train one model on GPU boxes that are far apart. The command line, and `from outerstep import DiLoCo`."""

from typing import TYPE_CHECKING, Any

from outerstep.shadowing import refuse_shadow

if TYPE_CHECKING:
    from worker.diloco import DiLoCo

__all__ = ["DiLoCo", "__version__"]

__version__ = "0.1.0"

refuse_shadow("protocol")  # which all of it needs, whatever is used


def __getattr__(name: str) -> Any:
    """Import `DiLoCo` on first use: it needs torch, and a coordinator runs without."""
    if name == "DiLoCo":
        refuse_shadow("worker")
        from worker.diloco import DiLoCo

        return DiLoCo
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
