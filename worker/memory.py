"""What a worker's memory holds for a model of a given size, by its settings, and which settings fit. Pure.

On a GPU, parameters, gradients and moments are on the device, except for offloaded ones; the outer state and the
pseudo-gradient are in host memory. On a CPU all of it is in host memory. The outer state and the pseudo-gradient of a
large model are in files if it trains on a CPU, or offloads: then only the fragments in use are in memory. Activations
come in addition: they depend on the model's shape and on the micro-batch.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from protocol.spec.model import Base

PARAMETER_BYTES = {"fp32": 4, "bf16": 2}
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "8bit": 1}  # each; AdamW has two
OUTER_STATE_BYTES = 8  # θ and u, in fp32
WORK_BYTES = 4  # the pseudo-gradient, in fp32
# In host memory beside the GPU: the above, and to train on while deltas are on their way, the parameters as they
# were sent, as they were when the round began, and what was trained since, with a copy of AdamW's moments to save.
TRAINING_ON_BYTES = OUTER_STATE_BYTES + 4 * WORK_BYTES + 8
IN_USE = 4 << 23  # elements of fragments that are made and uploaded at once, in a run with the default of their size
LIBRARIES_BYTES = 250_000_000  # of a worker beside torch, and its buffers
ROOM = 0.8  # share of the memory; activations need the rest


class Sizes(NamedTuple):
    """Of a model: the number of trained and frozen parameters, and the bytes that the frozen ones take in 4 bits (0 if
    they cannot be held that way)."""

    trained: int
    frozen: int = 0
    in_4_bits: int = 0


class Settings(NamedTuple):
    """How a worker holds a model: --param-dtype, --optimizer-state, --offload, --lora-base."""

    param_dtype: Literal["fp32", "bf16"]
    moments: Literal["fp32", "bf16", "8bit"]
    offload: bool = False
    lora_base: Base = "full"

    @property
    def options(self) -> str:
        """The worker's options for it; empty for its defaults."""
        found = [
            "" if self.param_dtype == "fp32" else f"--param-dtype {self.param_dtype}",
            "" if self.moments == self.param_dtype else f"--optimizer-state {self.moments}",
            "--offload" if self.offload else "",
            "" if self.lora_base == "full" else f"--lora-base {self.lora_base}",
        ]
        return " ".join(filter(None, found))


# From the fastest and most exact to the least memory.
SETTINGS = [
    Settings("fp32", "fp32"),
    Settings("fp32", "8bit"),
    Settings("bf16", "bf16"),
    Settings("bf16", "8bit"),
    Settings("bf16", "8bit", offload=True),
]
OF_ADAPTERS = [
    Settings("fp32", "fp32"),
    Settings("bf16", "bf16"),
    Settings("fp32", "fp32", lora_base="nf4"),
    Settings("bf16", "8bit", lora_base="nf4"),
]


def disk_bytes(trained: int, moments: float, *, in_files: bool) -> int:
    """Return the maximum bytes of a worker's state directory; `moments` are bytes per parameter. A snapshot has moments
    and pseudo-gradient, and exists twice while a new one is written. An outer state in files has three of them. One in
    memory has two copies on disk, neither of which is written at the same time as a snapshot."""
    snapshot = moments + WORK_BYTES
    if in_files:
        return int((3 * OUTER_STATE_BYTES + WORK_BYTES + 2 * snapshot) * trained)
    return int((2 * OUTER_STATE_BYTES + snapshot + max(OUTER_STATE_BYTES, snapshot)) * trained)


@dataclass(frozen=True)
class Need:
    """The bytes of a worker with these settings. `parameters`: with the frozen ones; `disk`: in its state directory."""

    settings: Settings
    parameters: int
    gradients: int
    moments: int
    outer_state: int
    work: int
    disk: int
    on_gpu: bool

    @property
    def device(self) -> int:
        """On the GPU; with a CPU, all of it."""
        if self.settings.offload:
            return self.parameters
        training = self.parameters + self.gradients + self.moments
        return training if self.on_gpu else training + self.host

    @property
    def host(self) -> int:
        """In host memory, beside the device's share."""
        offloaded = self.gradients + self.moments if self.settings.offload else 0
        return offloaded + self.outer_state + self.work + LIBRARIES_BYTES

    def fits(self, memory: float, host_memory: float | None) -> bool:
        """Return True if it fits on a device with `memory` bytes, whose host has `host_memory`; None: the device is a
        CPU, with that much memory for everything."""
        on_host = host_memory is None or self.host <= ROOM * host_memory
        return self.device <= ROOM * memory and on_host


def needs(sizes: Sizes, *, on_gpu: bool) -> list[Need]:
    """Return what a model of these sizes needs with AdamW, with each setting that suits it."""
    settings = OF_ADAPTERS if sizes.in_4_bits else SETTINGS
    return [need_of(sizes, each, on_gpu=on_gpu) for each in settings if on_gpu or not each.offload]


def need_of(sizes: Sizes, settings: Settings, *, on_gpu: bool, moments_each: int = 2) -> Need:
    """Return what a model of these sizes needs with these settings. `moments_each`: per trained parameter."""
    size, trained = PARAMETER_BYTES[settings.param_dtype], sizes.trained
    moments, in_file = moments_each * MOMENT_BYTES[settings.moments], settings.offload or not on_gpu
    return Need(
        settings,
        size * trained + (size * sizes.frozen if settings.lora_base == "full" else sizes.in_4_bits),
        size * trained,
        moments * trained,
        0 if in_file else OUTER_STATE_BYTES * trained,
        WORK_BYTES * (min(IN_USE, trained) if in_file else trained),
        disk_bytes(trained, moments, in_files=in_file),
        on_gpu,
    )
