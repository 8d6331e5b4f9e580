"""How a worker's process starts: its device, torch's precision, its process group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from worker.inner.precision import allow_tf32, precision_on
from worker.settings import BoxSettings


def start(settings: BoxSettings, size: int = 1) -> tuple[torch.device, str]:
    """Set TF32. Return the device of this process, one of `size` of the worker, and why it was
    chosen. Raises ValueError for a device that this machine lacks, or that does not support the settings."""
    name = settings.device
    if size > 1 and (name == "cuda" or (name == "auto" and torch.cuda.is_available())):
        device = choose_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")  # with GPUs, each process has one
    else:
        device = choose_device(name)
    allow_tf32(precision_on(device, settings.precision, settings.param_dtype))
    return device, why_device(name, device)


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; "auto" is the first available of CUDA, MPS and the CPU. Raises ValueError for a
    device that this machine lacks."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used: {reason}; use auto, cpu, cuda, cuda:1 or mps") from error
    return device


def check_gpus(gpus: int, device: str) -> None:
    """Raise ValueError if this machine has fewer than `gpus` GPUs for a worker on `device`."""
    there = torch.cuda.device_count()
    if device in ("auto", "cuda") and there < gpus:
        raise ValueError(
            f"--gpus {gpus}: torch sees {there} on this machine; --device cpu starts processes without GPUs"
        )


def why_device(name: str, device: torch.device) -> str:
    """Return a sentence on why the device was chosen, given the setting `name`."""
    called = f"device {device}"
    if device.type == "cuda":
        called += f" ({torch.cuda.get_device_name(device)})"
    if name != "auto":
        return f"{called}: --device {name}"
    lacking = {"cuda": "", "mps": ", as torch sees no CUDA here", "cpu": ", as torch sees neither CUDA nor MPS here"}
    return f"{called}: --device auto chooses the fastest available{lacking.get(device.type, '')}"


@contextmanager
def group_of(device: torch.device, size: int) -> Iterator[None]:
    """Join the process group of all processes that torchrun has started, unless there is one already or this process is
    the only one."""
    if size == 1 or torch.distributed.is_initialized():
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
