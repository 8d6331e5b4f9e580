"""The device: CUDA, or the CPU where there is none, which keeps these tests true for those who have no GPU at hand."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch finds none")
    return torch.device("cuda")
