"""What a worker's memory holds for a model of a given size, by its settings. Pure.

On a GPU, parameters, gradients and moments are on the device; the outer state and the pseudo-gradient are in host
memory. On a CPU all of it is in host memory, except for the outer state of a large model, which is in a file.
Activations come in addition: they depend on the model's shape and on the micro-batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

PARAMETER_BYTES = {"fp32": 4, "bf16": 2}
MOMENT_BYTES = {"fp32": 4, "bf16": 2, "8bit": 1}  # each; AdamW has two
OUTER_STATE_BYTES = 8  # θ and u, in fp32
WORK_BYTES = 4  # the pseudo-gradient, in fp32
ROOM = 0.8  # share of the memory; activations need the rest

# Parameters, moments: from what torch does by default to the least memory.
SETTINGS = [("fp32", "fp32"), ("fp32", "8bit"), ("bf16", "bf16"), ("bf16", "8bit")]


@dataclass(frozen=True)
class Need:
    """The bytes of a worker with these settings. `outer_state`: 0 if it is in a file."""

    parameters_as: str
    moments_as: str
    parameters: int
    gradients: int
    moments: int
    outer_state: int
    work: int

    @property
    def options(self) -> str:
        """The worker's options for it; empty for its defaults."""
        parameters = "" if self.parameters_as == "fp32" else f"--parameters {self.parameters_as}"
        moments = "" if self.moments_as == self.parameters_as else f"--optimizer-state {self.moments_as}"
        return f"{parameters} {moments}".strip()

    @property
    def training(self) -> int:
        """On the device."""
        return self.parameters + self.gradients + self.moments

    @property
    def host(self) -> int:
        """In host memory, beside a GPU."""
        return self.outer_state + self.work

    def fits(self, memory: int, host_memory: int | None) -> bool:
        """Return True if it fits on a device with `memory` bytes, whose host has `host_memory`; None: the device is a
        CPU, with that much memory for everything."""
        if host_memory is None:
            return self.training + self.host <= ROOM * memory
        return self.training <= ROOM * memory and self.host <= ROOM * host_memory


def needs(parameters: int, *, on_gpu: bool) -> Iterator[Need]:
    """Yield what each of SETTINGS needs for this many trained parameters, with AdamW."""
    for held, moments in SETTINGS:
        size = PARAMETER_BYTES[held] * parameters
        outer_state = OUTER_STATE_BYTES * parameters if on_gpu else 0
        work = WORK_BYTES * parameters
        yield Need(held, moments, size, size, 2 * MOMENT_BYTES[moments] * parameters, outer_state, work)
