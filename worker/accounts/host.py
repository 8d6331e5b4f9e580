"""What the coordinator is told of a worker's machine, and shows to all who may read the run; its owner chooses."""

import platform

import torch

from protocol.compiled import KERNELS
from protocol.messages import MAX_FACT_TEXT, HostDetail, HostValue, Metrics
from protocol.text import printable

# Of what the others tell nothing: what the arithmetic of a worker depends on, and not whose machine it is.
SOME = frozenset({"precision", "kernels", "torch", "python", "processes"})


def host_facts(device: torch.device) -> dict[str, HostValue]:
    """Return the facts about this machine, by name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "host": printable(platform.node())[:MAX_FACT_TEXT],
        "device": printable(f"{device}: {name}")[:MAX_FACT_TEXT],
        "threads": torch.get_num_threads(),
        "kernels": KERNELS,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def told_facts(facts: dict[str, HostValue], tell: HostDetail) -> dict[str, HostValue]:
    """Return those facts that are told."""
    return {name: value for name, value in facts.items() if tell == "all" or (tell == "some" and name in SOME)}


def told_metrics(metrics: Metrics, tell: HostDetail) -> Metrics:
    """Return the measurements as they are told: what gives the device away only with "all"."""
    return metrics if tell == "all" else metrics.model_copy(update={"mfu": None, "peak_memory_bytes": None})
