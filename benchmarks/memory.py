"""How much memory a worker needs per parameter, by its settings.

    python -m benchmarks.memory [--quick] [--json] [--rows "default;leanest"] [--size 134M] [--workers 1] [--device cpu]

Each row is an `outerstep worker` in a process of its own that trains two rounds: the peak of its memory, less that of
a process that has only imported torch and transformers, per parameter. On a GPU also the peak of the GPU's memory, as
torch counts it. With several workers, the largest of their peaks, and the coordinator's beside it. Only Linux counts
the peak of a process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig

from harness.coordinator import InProcess, coordinator_process
from harness.worker_processes import WorkerProcesses
from outerstep.common.quantities import bytes_text, count_text

IDLE = (
    "import sys, time, torch, transformers; transformers.LlamaForCausalLM; torch.zeros(1, device=sys.argv[1]); "
    "print('ready', flush=True); time.sleep(60)"
)
SHAPES: dict[str, dict[str, Any]] = {
    "14M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 16384},
    "134M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32000},
    "350M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 22, "vocab_size": 32000},
    "1.1B": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 19, "vocab_size": 32000},
}
SPEC = """
name = "{name}"
[model]
{model}
[data]
source = "python-stdlib"
sequence_length = 128
holdout = 0
[inner]
optimizer = "adamw"
batch_size = 2
learning_rate = 1e-4
[sync]
wait = "always"
rounds = 2
inner_steps = 2
[members]
min_workers = {workers}
"""
LEAN = ["--activation-checkpointing", "--micro-batch", "1"]
ROWS: dict[str, list[str]] = {
    "default": [],
    "8-bit moments": ["--optimizer-state", "8bit"],
    "bf16": ["--param-dtype", "bf16"],
    "leanest": ["--param-dtype", "bf16", "--optimizer-state", "8bit", *LEAN],
    "offloaded": ["--param-dtype", "bf16", "--optimizer-state", "8bit", "--offload", *LEAN],
    "adapters, fp32": ["--lora-base", "full", *LEAN],
    "adapters, nf4": ["--lora-base", "nf4", *LEAN],
}
ON_CUDA = ("offloaded",)
QUICK = ["default", "leanest"]
PAUSE_S = 0.05


@dataclass(frozen=True)
class Row:
    """`parameters`: of the model; `peak_bytes`: of a worker's process, above an idle one; `gpu_bytes`: of the GPU, or
    None; `coordinator_bytes`: all of it."""

    settings: str
    parameters: int
    peak_bytes: int
    gpu_bytes: int | None
    coordinator_bytes: int
    seconds: float

    @property
    def per_parameter(self) -> float:
        return self.peak_bytes / self.parameters


def peak_so_far(pid: int) -> int:
    """Return the peak resident memory in bytes of a running process; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = dict(line.split(":", 1) for line in text.splitlines())
    return 1024 * int(lines["VmHWM"].split()[0]) if "VmHWM" in lines else 0


def peak_of(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """Return the largest peak of the resident memory in bytes of these processes, once all have ended."""
    peak = 0
    while any(each.poll() is None for each in processes):
        peak = max(peak, *(peak_so_far(each.pid) for each in processes))
        time.sleep(PAUSE_S)
    return peak


def idle_bytes(device: str) -> int:
    with subprocess.Popen([sys.executable, "-c", IDLE, device], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        peak = peak_so_far(process.pid)
        process.kill()
    return peak


def measure(settings: str, size: str, workers: int, running: InProcess, directory: Path, idle: int, device: str) -> Row:
    """Train a run with these settings. Raises RuntimeError if the worker does not end well."""
    name, adapted = settings.replace(" ", "-").replace(",", ""), settings.startswith("adapters")
    heads = SHAPES[size]["hidden_size"] // 64
    config = LlamaConfig(**SHAPES[size], num_attention_heads=heads, num_key_value_heads=heads)
    base = directory / "base"
    with torch.device("meta"):
        parameters = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    if adapted and not base.exists():
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(base)
    shape = ", ".join(f"{key} = {value}" for key, value in SHAPES[size].items())
    shape += f", num_attention_heads = {heads}, num_key_value_heads = {heads}"
    model = f'config = {{ model_type = "llama", {shape} }}'
    if adapted:
        model = f'pretrained = "{base}"\n[model.lora]\nrank = 8'
    running.create_run(SPEC.format(name=name, model=model, workers=workers))
    began = time.monotonic()
    with WorkerProcesses(running, name, directory, device=device) as started:
        peak = peak_of(
            [started.start(f"{name}-{number}", "--data-root", "/", *ROWS[settings]) for number in range(workers)]
        )
        started.check()
        on_gpu = [each.metrics.peak_memory_bytes or 0 for each in started.workers()] if device == "cuda" else []
    seconds = round(time.monotonic() - began, 1)
    return Row(settings, parameters, peak - idle, max(on_gpu, default=None), peak_so_far(running.pid), seconds)


def table(rows: list[Row], idle: int) -> Table:
    columns = ("settings", "parameters", "peak memory", "bytes per parameter", "on the GPU", "coordinator", "seconds")
    shown = Table(*columns, caption=f"idle: {bytes_text(idle)}")
    for each in rows:
        cells = count_text(each.parameters), bytes_text(each.peak_bytes), f"{each.per_parameter:.2f}"
        gpu = "" if each.gpu_bytes is None else f"{bytes_text(each.gpu_bytes)}, {each.gpu_bytes / each.parameters:.2f}"
        shown.add_row(each.settings, *cells, gpu, bytes_text(each.coordinator_bytes), f"{each.seconds:.0f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: text.split(";"), help="default: all that the device can take")
    parser.add_argument("--size", choices=list(SHAPES), help="default: 134M")
    parser.add_argument("--quick", action="store_true", help="14M and two rows, unless given: shows that it works")
    parser.add_argument("--workers", type=int, default=1, help="default: 1")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    there = [each for each in ROWS if arguments.device == "cuda" or each not in ON_CUDA]
    chosen = arguments.rows or (QUICK if arguments.quick else there)
    size = arguments.size or ("14M" if arguments.quick else "134M")
    if unknown := [each for each in chosen if each not in there]:
        parser.error(f"no row on {arguments.device} is called {unknown[0]!r}; there are: {', '.join(there)}")
    idle, rows = idle_bytes(arguments.device), list[Row]()
    with tempfile.TemporaryDirectory(prefix="outerstep-") as directory:
        place = Path(directory)
        with coordinator_process() as running:
            given = size, arguments.workers, running, place, idle, arguments.device
            for each in chosen:
                rows.append(measure(each, *given))
                print(rows[-1], file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps([asdict(each) | {"per_parameter": each.per_parameter} for each in rows], indent=2))
    else:
        Console().print(table(rows, idle))


if __name__ == "__main__":
    main()
