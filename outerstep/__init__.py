"""Outerstep: train one model on GPU boxes that are far apart. The command line, and `from outerstep import DiLoCo`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outerstep.shadowing import refuse_shadow

if TYPE_CHECKING:
    from protocol.messages import DataSummary, EvaluationReport
    from worker.diloco import DiLoCo
    from worker.inner.loss import unpack

__all__ = ["DataSummary", "DiLoCo", "EvaluationReport", "unpack", "__version__"]

_SCRIPTS = {
    "DiLoCo": "worker.diloco",
    "DataSummary": "protocol.messages",
    "EvaluationReport": "protocol.messages",
    "unpack": "worker.inner.loss",
}

refuse_shadow("protocol")  # everything needs it

from protocol import __version__  # noqa: E402


def __getattr__(name: str) -> Any:
    """Import the names for scripts on first use: they need torch, which a coordinator does not have."""
    if name in _SCRIPTS:
        refuse_shadow("worker")
        return getattr(import_module(_SCRIPTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
