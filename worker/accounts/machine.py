"""The worker's machine: what its owner lets the coordinator know about it, and how well its device is used.

The facts are visible to everyone who may read the run.
"""

import platform
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from protocol.compiled import KERNELS
from protocol.messages import MAX_FACT_TEXT, HostDetail, HostValue, Metrics
from protocol.text import printable

# Dense peaks in TFLOP/s from the makers' data sheets: bf16 and fp16 with fp32 accumulation, TF32, fp32. A name must
# occur, as whole words, in torch's name of the device; the first match counts.
PEAKS: dict[str, tuple[float, float, float]] = {
    "GB200": (2500, 1250, 80),
    "B200": (2250, 1125, 75),
    "H200": (989.4, 494.7, 66.9),
    "H100 NVL": (835, 417.5, 60),
    "H100 PCIe": (756, 378, 51),
    "H100": (989.4, 494.7, 66.9),
    "A100": (312, 156, 19.5),
    "A800": (312, 156, 19.5),
    "A40": (149.7, 74.8, 37.4),
    "A30": (165, 82, 10.3),
    "A10G": (70, 35, 31.5),
    "A10": (125, 62.5, 31.2),
    "L40S": (362, 183, 91.6),
    "L40": (181, 90.5, 90.5),
    "L4": (121, 60, 30.3),
    "RTX 6000 Ada": (364.2, 182.1, 91.1),
    "RTX A6000": (154.8, 77.4, 38.7),
    "RTX 5090": (209.5, 104.8, 104.8),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 3090": (71, 35.6, 35.6),
    "MI355X": (2500, 0, 157.3),
    "MI325X": (1307.4, 653.7, 163.4),
    "MI300X": (1307.4, 653.7, 163.4),
}

_OTHERS = re.compile(r"\b(Laptop|Max-Q|MIG|Ti|D)\b")  # variants of the same name with other speeds


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of a device with this name; None if it is not in the table. For float8 it is that of bf16,
    in which the attention and the head are computed."""
    column = {"float8": 0, "bf16": 0, "fp16": 0, "tf32": 1, "fp32": 2}[precision]
    if _OTHERS.search(device_name):
        return None
    for name, peaks in PEAKS.items():
        if re.search(rf"\b{name}\b", device_name):
            return peaks[column] * 1e12 or None
    return None


@dataclass(frozen=True)
class DeviceUse:
    """A device, with the model's FLOPs per token and the device's peak in FLOP/s; None: unknown."""

    device: torch.device
    flops_per_token: float | None = None
    peak_flops: float | None = None

    def utilisation(self, tokens_per_second: float) -> float | None:
        """Return the share of the peak used by the model's own arithmetic (MFU)."""
        if self.flops_per_token is None or self.peak_flops is None:
            return None
        return tokens_per_second * self.flops_per_token / self.peak_flops

    def peak_memory_bytes(self) -> int | None:
        """Return the peak memory of the process: on a GPU as counted by torch, else in host memory; None if it is not
        counted."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if self.device.type != "cpu":
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


# The facts sent with "some": what the arithmetic of a worker depends on, but not whose machine it is.
SOME = frozenset({"precision", "base", "kernels", "torch", "python", "processes"})


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


def shared_facts(facts: dict[str, HostValue], report: HostDetail) -> dict[str, HostValue]:
    """Return the facts that are sent."""
    return {name: value for name, value in facts.items() if report == "all" or (report == "some" and name in SOME)}


def shared_metrics(metrics: Metrics, report: HostDetail) -> Metrics:
    """Return the metrics that are sent: those that reveal the device only with "all"."""
    return metrics if report == "all" else metrics.model_copy(update={"mfu": None, "peak_memory_bytes": None})


def host_free_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the available bytes of host memory, or of this container if it has less."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    except (OSError, KeyError, ValueError):
        pass
    try:
        most, now = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        found.append(int(most) - int(now) + int(stat["inactive_file"]))  # page cache that the kernel can reclaim
    except (OSError, KeyError, ValueError):  # no cgroup v2, or "max"
        pass
    return min(found, default=None)


def free_memory(device: torch.device) -> tuple[int | None, int | None]:
    """Return the free bytes of the device and of its host; for a CPU, those of the host and None. None as well for what
    the system does not report."""
    host = host_free_bytes()
    return (torch.cuda.mem_get_info(device)[0], host) if device.type == "cuda" else (host, None)
