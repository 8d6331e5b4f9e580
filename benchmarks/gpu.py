"""The cost of a sync on a GPU: quantising pseudo-gradients and outer steps by encoded deltas, compared with bare
copies.

    python -m benchmarks.gpu [--quick] [--json] [--elements 1e9] [--device cuda]

Each is measured on --elements values, in fragments as in a run, and reported as a share of the bandwidth of a plain
copy in the same memory in the same run. Bytes are the least that each must read and write:

  quantise     fp32 values on the device -> encoded bytes on the device: 4 bytes read, the encoded ones written
  to the host  the same, and the transfer of the encoded bytes to host memory; compared with a copy of as many bytes
  outer step   an encoded delta and the outer state in host memory -> the outer state, by as many threads as download
               deltas: the delta and 8 bytes read, 8 written
  to the GPU   the transfer of the new parameters to the device, from pinned memory

Medians of seven after a warm-up. Targets: quantising, and decoding with the outer step, at 70 % of the bandwidth.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from protocol.codecs import CODECS
from protocol.compiled import KERNELS
from protocol.outer_step import outer_step_by
from protocol.wire import CHUNK_ELEMENTS
from worker.codecs import TORCH_CODECS, batches, encoded_chunks
from worker.rounds.in_flight import DOWNLOADS

FRAGMENT_ELEMENTS = 1 << 23
REPEATS = 7
CODECS_MEASURED = ("int8", "int4")
FP32_BYTES = 4


@dataclass(frozen=True)
class Measured:
    """An operation: seconds, the bytes that it must move, and the share of a copy's bandwidth in that memory."""

    operation: str
    codec: str
    seconds: float
    gb_s: float
    share: float


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds until `work` is done, also on the device."""
    taken = []
    for _ in range(REPEATS + 1):
        _await(device)
        began = time.perf_counter()
        work()
        _await(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _await(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(codec: str, elements: int, device: torch.device) -> list[Measured]:
    """Measure everything on all `elements` values, as the caches can hold a fragment but not a model."""
    generator = torch.Generator().manual_seed(0)
    sizes = [len(part) for part in torch.empty(elements, device="meta").split(FRAGMENT_ELEMENTS)]
    values = [torch.randn(n, generator=generator).mul_(1e-3) for n in sizes]
    pinned = [each.pin_memory() if device.type == "cuda" else each.clone() for each in values]
    on_device = [each.to(device) for each in values]
    raw = [list(encoded_chunks(each, codec)) for each in values]
    theta, momentum = values, [torch.zeros(n) for n in sizes]

    def copy(source: list[Tensor], target: list[Tensor]) -> None:
        for here, there in zip(source, target, strict=True):
            there.copy_(here, non_blocking=True)

    def quantise() -> None:
        for fragment in on_device:
            for chunks in batches(fragment):
                TORCH_CODECS[codec].encode(chunks)

    def outer_step(p: int) -> None:
        chunks = zip(raw[p], theta[p].split(CHUNK_ELEMENTS), momentum[p].split(CHUNK_ELEMENTS), strict=True)
        for data, t, u in chunks:
            outer_step_by(CODECS[codec], data, t.numpy(), u.numpy(), learning_rate=0.7, beta=0.9)

    fp32_bytes, raw_bytes = FP32_BYTES * elements, sum(len(chunk) for each in raw for chunk in each)
    others = [torch.empty_like(each) for each in on_device]
    copied_s = {
        "device": seconds_of(lambda: copy(on_device, others), device),
        "down": seconds_of(lambda: copy(on_device, pinned), device),
        "up": seconds_of(lambda: copy(pinned, others), device),
        "host": seconds_of(lambda: copy(values, pinned), torch.device("cpu")),
    }
    with ThreadPoolExecutor(DOWNLOADS) as threads:
        taken_s = {
            "quantise": seconds_of(quantise, device),
            "to the host": seconds_of(lambda: [list(encoded_chunks(each, codec)) for each in on_device], device),
            "outer step": seconds_of(lambda: list(threads.map(outer_step, range(len(sizes)))), device),
            "to the GPU": seconds_of(lambda: copy(pinned, others), device),
        }
    # The bytes that each must move, and those of the compared copy; a copy within a memory reads and writes.
    beside = {
        "quantise": (fp32_bytes + raw_bytes, 2 * fp32_bytes / copied_s["device"]),
        "to the host": (raw_bytes, fp32_bytes / copied_s["down"]),
        "outer step": (raw_bytes + 4 * fp32_bytes, 2 * fp32_bytes / copied_s["host"]),
        "to the GPU": (fp32_bytes, fp32_bytes / copied_s["up"]),
    }
    return [
        Measured(name, codec, round(s, 6), round(moved / s / 1e9, 3), round(moved / s / bandwidth, 4))
        for (name, s), (moved, bandwidth) in zip(taken_s.items(), beside.values(), strict=True)
    ]


def table(found: Sequence[Measured]) -> Table:
    shown = Table("operation", "codec", *("seconds", "GB/s", "of a copy's"))
    for each in found:
        shown.add_row(each.operation, each.codec, f"{each.seconds:.4f}", f"{each.gb_s:.1f}", f"{each.share:.0%}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="What a sync costs a GPU.")
    parser.add_argument("--quick", action="store_true", help="two million elements")
    parser.add_argument("--json", action="store_true", help="one line of JSON, last")
    parser.add_argument("--elements", type=float, default=1e9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    elements = 2_000_000 if options.quick else int(options.elements)
    found = [each for codec in CODECS_MEASURED for each in measure(codec, elements, device)]
    Console().print(table(found))
    if options.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        facts = {"benchmark": "gpu", "device": f"{device}: {name}", "torch": torch.__version__, "kernels": KERNELS}
        print(json.dumps({**facts, "elements": elements, "sync": [asdict(each) for each in found]}))


if __name__ == "__main__":
    main()
