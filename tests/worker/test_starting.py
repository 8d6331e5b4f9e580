"""What a worker decides for its box, with the reason that its log and `outerstep doctor` tell."""

from typing import Any

import pytest
import torch

from worker.inner.data_parallel import choose_mode
from worker.inner.micro_batch import choose_micro_batch
from worker.settings import BoxSettings
from worker.starting import choose_device, start, why_device


@pytest.mark.parametrize(
    ("budget", "wanted", "mode", "why"),
    [
        (20e9, "auto", "ddp", "16.0 GB of the 20.0 GB"),
        (15e9, "auto", "fsdp", "16.0 GB of the 15.0 GB"),
        (None, "auto", "ddp", "without a GPU"),
        (20e9, "fsdp", "fsdp", "--parallel fsdp"),
    ],
)
def test_the_mode(budget: float | None, wanted: Any, mode: str, why: str) -> None:
    chosen, reason = choose_mode(10**9, budget, wanted)
    assert chosen == mode
    assert reason.startswith(f"mode {mode}: ")
    assert why in reason


@pytest.mark.parametrize(
    ("given", "size", "why"),
    [
        ((4, 16), 4, "4 of 16 sequences"),
        ((64, 16), 64, "16 of 16 sequences: --micro-batch 64"),
        (("auto", 16), 16, "all 16 sequences at once"),
        (("auto", 16, 2), 16, "all 16 sequences of each process"),
        (
            ("auto", 16, 1, 1 << 28),
            4,
            "4 of 16 sequences",
        ),
        (("auto", 16, 1, 1 << 20), 16, "all 16 sequences at once"),
    ],
)
def test_the_micro_batch(given: Any, size: int, why: str) -> None:
    micro_batches, reason = choose_micro_batch(*given)
    assert micro_batches.size == size
    assert why in reason


def test_the_device() -> None:
    assert start(BoxSettings(device="cpu")) == (torch.device("cpu"), "device cpu: --device cpu")
    assert why_device("auto", torch.device("cpu")) == (
        "device cpu: --device auto chooses the fastest available, as torch sees neither CUDA nor MPS here"
    )
    with pytest.raises(ValueError, match="device 'cudda' cannot be used: .* use auto, cpu, cuda, cuda:1 or mps"):
        choose_device("cudda")
