"""The input of every peer, and the error of its result. Runs in each peer's environment, on numpy alone."""

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]


def arguments(description: str | None) -> argparse.Namespace:
    """Parse the command line of every peer's script: `params`, `workers`, `rounds`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True, help="measured syncs, after a warm-up")
    return parser.parse_args()


def draw(rank: int, elements: int) -> Vector:
    """Draw the pseudo-gradient of worker `rank`: normal, standard deviation 1e-3, fp32 of shape (elements,)."""
    return np.random.default_rng(rank).standard_normal(elements, dtype=np.float32) * np.float32(1e-3)


def mean(workers: int, elements: int) -> Vector:
    """Return the mean of all workers' pseudo-gradients, fp32 of shape (elements,)."""
    total = draw(0, elements)
    for rank in range(1, workers):
        total += draw(rank, elements)
    return total / np.float32(workers)


def relative_error(found: Vector, exact: Vector) -> float:
    """Return ‖found - exact‖ / ‖exact‖; infinite if the shapes differ."""
    if found.shape != exact.shape:
        return float("inf")
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def loopback_bytes() -> int:
    """Return the bytes that the interface `lo` of this network namespace has carried so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise LookupError("this network namespace has no interface lo")
