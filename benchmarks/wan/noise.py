"""What all of them average."""

import torch


def noise(elements: int, rank: int) -> torch.Tensor:
    """Draw float32[elements], as hard to compress as a pseudo-gradient."""
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)) * 1e-3
