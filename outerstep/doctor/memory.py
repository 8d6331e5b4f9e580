"""The memory that training takes, by how many processes share the model: arithmetic, and what this box has."""

from dataclasses import dataclass
from pathlib import Path

import torch

from outerstep.common.quantities import bytes_text
from outerstep.doctor.finding import Finding, fine, warning, wrong
from outerstep.doctor.model import MOMENT_BYTES, Model
from outerstep.doctor.state_directory import OUTER_STATE_BYTES
from worker.inner.data_parallel import Mode

TIGHT = 0.8  # of a device: activations need the rest
FP32_BYTES = 4


@dataclass(frozen=True)
class Need:
    """Bytes, without activations. `device_bytes` are of each device, `host_bytes` of all processes together, and
    `assembling_bytes` of these only while a sharded model is put together."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    outer_state: int
    assembling: int

    @property
    def device_bytes(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.gathered

    @property
    def host_bytes(self) -> int:
        return max(self.outer_state, self.assembling)


def need(model: Model, mode: Mode | None, processes: int, parameters: str = "fp32") -> Need:
    """Return what `processes` need that share the model as `mode` says; None: there is one. `parameters`: fp32 or bf16.

    Replicas have their gradients in the buckets of the all-reduce once more. Of shards, a layer and the next one are
    gathered at a time, and each process puts the whole model together in host memory first. The outer state, each
    fragment with its owner, is in host memory once.
    """
    size = FP32_BYTES if parameters == "fp32" else 2
    parts = processes if mode == "fsdp" else 1
    optimizer = 2 * MOMENT_BYTES if model.optimizer_bytes is None else model.optimizer_bytes
    everything = model.elements + model.frozen
    return Need(
        parameters=size * everything // parts,
        gradients=size * model.elements // parts * (2 if mode == "ddp" else 1),
        optimizer=int(optimizer * size / FP32_BYTES * model.elements / parts),
        gathered=2 * size * model.largest_layer if mode == "fsdp" else 0,
        outer_state=OUTER_STATE_BYTES * model.elements,
        assembling=FP32_BYTES * everything * processes if mode == "fsdp" else 0,
    )


@dataclass(frozen=True)
class Room:
    """Free bytes of the device, of the fullest of several; None where it is the host's. And of the host; None where
    nobody says."""

    device_bytes: int | None
    host_bytes: int | None


def look(device: torch.device, processes: int) -> Room:
    host = host_free_bytes()
    if device.type != "cuda":
        return Room(None, host)
    devices = [device] if processes == 1 else [torch.device("cuda", index) for index in range(processes)]
    return Room(min(torch.cuda.mem_get_info(each)[0] for each in devices), host)


def host_free_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return what programs may still take of the host's memory, of this container's where it has less."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    except (OSError, KeyError, ValueError):
        pass
    try:
        most, now = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        found.append(int(most) - int(now) + int(stat["inactive_file"]))  # which the kernel takes back
    except (OSError, KeyError, ValueError):  # no cgroup of version 2, or "max"
        pass
    return min(found, default=None)


def judge(needed: Need, room: Room, processes: int, device: torch.device) -> list[Finding]:
    on_host = needed.host_bytes + (processes * needed.device_bytes if room.device_bytes is None else 0)
    each = "" if processes == 1 else f", each of {processes}"
    said = (
        f"{bytes_text(needed.device_bytes)} on {device}{each} (parameters {bytes_text(needed.parameters)}, gradients "
        f"{bytes_text(needed.gradients)}, optimizer {bytes_text(needed.optimizer)}"
        + (f", gathered layers {bytes_text(needed.gathered)}" if needed.gathered else "")
        + f") and activations; outer state {bytes_text(needed.outer_state)} in host memory"
        + (f", {bytes_text(needed.assembling)} there at the start" if needed.assembling else "")
        + ". Free: "
        + (f"{bytes_text(room.device_bytes)} on {device}, " if room.device_bytes is not None else "")
        + f"{bytes_text(room.host_bytes)} of host memory"
    )
    if room.device_bytes is not None and needed.device_bytes > room.device_bytes:
        return [wrong("memory", said, "--gpus N with --mode fsdp, --parameters bf16, or a GPU with more")]
    if room.host_bytes is not None and on_host > room.host_bytes:
        return [wrong("memory", said, "end what else takes the host's memory, or use a machine with more")]
    if room.device_bytes is not None and needed.device_bytes > TIGHT * room.device_bytes:
        return [warning("memory", said, "little is left for activations: --activation-checkpointing saves some")]
    return [fine("memory", said)]
