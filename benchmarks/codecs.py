"""The costs of each codec: bytes per parameter on the wire, and speed on one core, in numpy, compiled and in torch.

    python -m benchmarks.codecs [--quick] [--json]

Bytes are of whole payloads, header included, of one fragment. Its values are a real pseudo-gradient (of the preset
`tiny` in its third round of 50 inner steps on the standard library's sources) or synthetic: Gaussian, Laplace, or
Student's t with 3 degrees of freedom. The error is the real one's: the L2 norm of the encoding error relative to the
whole; codecs with error feedback send it later.

Speeds are of Gaussian values, median over repeats after a warm-up; 1 GB/s is 10^9 bytes of fp32 values per second, that
is 0.25 G elements per second. encode, decode and accumulate are of the codec alone, step is the outer step by encoded
values; pack and unpack are of whole frames, with zstd and the receiver's check. numpy is the reference. "hot" are
the compiled kernels on one chunk repeatedly, out of the cache; otherwise values come from memory.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.faults import FULL, Replica
from protocol.codecs import CODECS, REFERENCE
from protocol.codecs.base import Codec
from protocol.compiled import KERNELS
from protocol.digest import DIGEST_BYTES
from protocol.outer_step import in_numpy, outer_step_by
from protocol.wire import CHUNK_ELEMENTS, ContributionHeader, Payload, chunk_sizes, pack_frame, pack_frames, pack_header
from worker.codecs.torch_codecs import IN_TORCH
from worker.data.open_training_set import TextData

DISTRIBUTIONS = ("gaussian", "laplace", "student-t3")
ROUNDS = 3  # of training, until the pseudo-gradients look like those of most of a run

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

OPERATIONS = ("encode", "decode", "accumulate", "step", "pack", "unpack")


def sample(distribution: str, n: int) -> F32:
    """Draw float32[n] with the magnitude of a pseudo-gradient; always the same values."""
    random = np.random.default_rng(0)
    draw: dict[str, Callable[[], npt.NDArray[np.float64]]] = {
        "gaussian": lambda: random.standard_normal(n),
        "laplace": lambda: random.laplace(size=n),
        "student-t3": lambda: random.standard_t(3, size=n),
    }
    return (1e-3 * draw[distribution]()).astype(np.float32)


def real_pseudo_gradient() -> F32:
    """Return the pseudo-gradient of one worker's last round, float32[139584]."""
    spec = FULL.spec(seed=0)
    h = spec.sync.inner_steps
    replica = Replica(spec, TextData(spec))
    for number in range(ROUNDS):
        start = [parameter.detach().clone() for parameter in replica.parameters]
        replica.train(range(number * h, (number + 1) * h), number * h)
    deltas = [(old - new.detach()).flatten() for old, new in zip(start, replica.parameters, strict=True)]
    return torch.cat(deltas).numpy()


def relative_error(values: F32, name: str) -> float:
    codec, decoded = CODECS[name], np.empty_like(values)
    Payload.from_bytes(payload(values, codec.name, zstd=False)).decode(decoded)
    return float(np.linalg.norm(values - decoded) / np.linalg.norm(values))


def payload(values: F32, codec: str, *, zstd: bool) -> bytes:
    frames = pack_frames(values, CODECS[codec], zstd=zstd)
    header = ContributionHeader(
        run="benchmark",
        round=0,
        fragment=0,
        codec=codec,
        elements=len(values),
        chunk_elements=CHUNK_ELEMENTS,
        frame_bytes=[len(frame) for frame in frames],
        worker="worker",
        base=bytes(DIGEST_BYTES),
        tokens=1 << 20,
        inner_steps=500,
        loss=2.5,
        norm=1.0,
        units=[[0, 500]],
        carried=[],
        carried_share=1.0,
    )
    return pack_header(header) + b"".join(frames)


def seconds(operation: Callable[[], object], repeats: int) -> float:
    """Return the median wall time of `operation` after one warm-up, in seconds."""
    operation()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        operation()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def host_operations(values: F32, codec: Codec) -> dict[str, Callable[[], object]]:
    chunks = np.split(values, range(CHUNK_ELEMENTS, len(values), CHUNK_ELEMENTS))
    raws: list[U8] = [np.empty(codec.size(len(chunk)), np.uint8) for chunk in chunks]
    outs, momenta = ([np.zeros_like(chunk) for chunk in chunks] for _ in range(2))
    whole = Payload.from_bytes(payload(values, codec.name, zstd=True))

    def encode() -> None:
        for chunk, raw in zip(chunks, raws, strict=True):
            codec.encode(chunk, raw)

    def decode() -> None:
        for raw, out in zip(raws, outs, strict=True):
            codec.decode(raw, out)

    def accumulate() -> None:
        for raw, out in zip(raws, outs, strict=True):
            codec.accumulate(raw, np.float32(0.25), out)

    def step() -> None:
        for raw, theta, momentum in zip(raws, outs, momenta, strict=True):
            if codec is REFERENCE[codec.name]:
                delta = np.empty_like(theta)
                codec.decode(raw, delta)
                in_numpy(theta, momentum, delta, learning_rate=0.7, beta=0.9)
            else:
                outer_step_by(codec, raw, theta, momentum, learning_rate=0.7, beta=0.9)

    def unpack() -> None:
        for index, out in enumerate(outs):
            raw = whole.chunk(index)
            codec.check(raw, len(out), whole.limit)
            codec.decode(raw, out)

    encode()
    return {
        "encode": encode,
        "decode": decode,
        "accumulate": accumulate,
        "step": step,
        "pack": lambda: pack_frames(values, codec, zstd=True),
        "unpack": unpack,
    }


def torch_operations(values: F32, name: str) -> dict[str, Callable[[], object]]:
    codec = IN_TORCH[name]
    chunks = torch.from_numpy(values).split(CHUNK_ELEMENTS)
    raws = [codec.encode(chunk) for chunk in chunks]
    sizes = list(chunk_sizes(len(values), CHUNK_ELEMENTS))
    operations: dict[str, Callable[[], object]] = {
        "encode": lambda: [codec.encode(chunk) for chunk in chunks],
        "decode": lambda: [codec.decode(raw, n) for raw, n in zip(raws, sizes, strict=True)],
        "pack": lambda: [pack_frame(codec.encode(chunk).numpy(), zstd=True) for chunk in chunks],
    }
    if name == "fp32":
        del operations["decode"]  # it is a view of the bytes: nothing to time
    return operations


def libraries(values: F32, name: str) -> dict[str, dict[str, Callable[[], object]]]:
    """Return the functions to time, by library and operation."""
    operations = {"numpy": host_operations(values, REFERENCE[name])}
    if CODECS[name] is not REFERENCE[name]:
        operations["compiled"] = host_operations(values, CODECS[name])
        # One chunk, as often as the values have chunks: the same number of elements.
        hot = host_operations(values[:CHUNK_ELEMENTS], CODECS[name])
        times = range(len(values) // CHUNK_ELEMENTS)
        operations["hot"] = {
            each: partial(repeat, hot[each], times) for each in ("encode", "decode", "accumulate", "step")
        }
    operations["torch"] = torch_operations(values, name)
    return operations


def repeat(operation: Callable[[], object], times: range) -> None:
    for _ in times:
        operation()


def measure(elements: int, repeats: int) -> dict[str, Any]:
    real = real_pseudo_gradient()
    samples = {"real": real, **{distribution: sample(distribution, elements) for distribution in DISTRIBUTIONS}}
    bytes_per_parameter = {
        name: {
            distribution: {
                "raw": len(payload(values, name, zstd=False)) / len(values),
                "zstd": len(payload(values, name, zstd=True)) / len(values),
            }
            for distribution, values in samples.items()
        }
        for name in CODECS
    }
    values = samples["gaussian"]
    speed = {
        name: {
            library: {operation: elements / seconds(run, repeats) / 1e9 for operation, run in operations.items()}
            for library, operations in libraries(values, name).items()
        }
        for name in CODECS
    }
    return {
        "benchmark": "codecs",
        "elements": elements,
        "repeats": repeats,
        "machine": platform.processor() or platform.machine(),
        "numpy": np.__version__,
        "torch": torch.__version__,
        "kernels": KERNELS,
        "bytes_per_parameter": bytes_per_parameter,
        "relative_error": {name: relative_error(real, name) for name in CODECS},
        "giga_elements_per_second": speed,
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['elements']:,} elements, one core, median of {result['repeats']}; kernels {result['kernels']}",
        "",
        "bytes per parameter, header included (raw / zstd)",
        f"{'codec':8}" + "".join(f"{name:>18}" for name in ("real", *DISTRIBUTIONS, "error of real")),
    ]
    for name, sizes in result["bytes_per_parameter"].items():
        cells = (f"{size['raw']:.4f} / {size['zstd']:.4f}" for size in sizes.values())
        error = f"{100 * result['relative_error'][name]:.2g} %"
        lines.append(f"{name:8}" + "".join(f"{cell:>18}" for cell in (*cells, error)))
    lines += [
        "",
        "GB/s of fp32 values (G elements/s), gaussian",
        f"{'codec':8}{'library':10}" + "".join(f"{operation:>16}" for operation in OPERATIONS),
    ]
    for name, libraries in result["giga_elements_per_second"].items():
        for library, speed in libraries.items():
            cells = (f"{4 * speed[o]:.2f} ({speed[o]:.2f})" if o in speed else "–" for o in OPERATIONS)
            lines.append(f"{name:8}{library:10}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="bytes and speed of each codec, on one core")
    parser.add_argument("--quick", action="store_true", help="2 M elements instead of 8 M, and fewer repeats")
    parser.add_argument("--json", action="store_true", help="add one line of JSON with all figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(elements=1 << 21, repeats=5) if arguments.quick else measure(elements=1 << 23, repeats=9)
    print(table(result))
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
