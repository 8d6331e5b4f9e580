"""What the coordinator shows about a worker's machine."""

import platform

import torch

from protocol.compiled import KERNELS


def host_facts(device: torch.device) -> dict[str, str | int | float]:
    """Return the facts about this machine, by name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "host": platform.node(),
        "device": f"{device}: {name}",
        "threads": torch.get_num_threads(),
        "kernels": KERNELS,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
