"""What a worker decides for its box, with the reason that its log and `outerstep doctor` tell."""

from typing import Any

import pytest
import torch

from worker.inner.micro_batch import choose_micro_batch
from worker.inner.spreading import choose_mode
from worker.settings import BoxSettings
from worker.starting import choose_device, start, why_device


@pytest.mark.parametrize(
    ("room", "wanted", "mode", "why"),
    [
        (20e9, "auto", "ddp", "mode ddp: a replica takes 16.0 GB of the 20.0 GB that it may"),
        (15e9, "auto", "fsdp", "mode fsdp: a replica takes 16.0 GB of the 15.0 GB that it may"),
        (None, "auto", "ddp", "mode ddp: processes without a GPU have a replica each"),
        (20e9, "fsdp", "fsdp", "mode fsdp: --mode fsdp"),
    ],
)
def test_the_mode(room: float | None, wanted: Any, mode: str, why: str) -> None:
    assert choose_mode(10**9, room, wanted) == (mode, why)


@pytest.mark.parametrize(
    ("given", "size", "why"),
    [
        ((4, 16), 4, "micro-batch of 4 of 16 sequences: --micro-batch 4"),
        ((64, 16), 64, "micro-batch of 16 of 16 sequences: --micro-batch 64"),
        (("auto", 16), 16, "micro-batch auto: all 16 sequences at once, fewer where they do not fit"),
        (("auto", 16, 2), 16, "micro-batch auto: all 16 sequences of each process at once"),
        (
            ("auto", 16, 1, 1 << 28),
            4,
            "micro-batches of 4 of 16 sequences, so that their logits take 1 GiB at most",
        ),
        (("auto", 16, 1, 1 << 20), 16, "micro-batch auto: all 16 sequences at once, fewer where they do not fit"),
    ],
)
def test_the_micro_batch(given: Any, size: int, why: str) -> None:
    sizes, told = choose_micro_batch(*given)
    assert (sizes.size, told) == (size, why)


def test_the_device() -> None:
    assert start(BoxSettings(device="cpu", threads=1)) == (torch.device("cpu"), "device cpu: --device cpu")
    assert why_device("auto", torch.device("cpu")) == (
        "device cpu: --device auto chooses the fastest available, as torch sees neither CUDA nor MPS here"
    )
    with pytest.raises(ValueError, match="device 'cudda' cannot be used: .* use auto, cpu, cuda, cuda:1 or mps"):
        choose_device("cudda")
