"""The speed of inner steps on this machine's device: tokens per second, MFU and peak memory, by settings of the worker.

    python -m benchmarks.inner_steps [--quick] [--json] [--preset llama-150m] [--batch-size 64] [--sequence-length 1024]
        [--rows "auto;compiled"]

Each row takes the first steps of a worker, as `outerstep doctor` does: the first one separately, since it compiles and
allocates, then the median of a few. MFU is as in PaLM (arXiv 2204.02311, appendix B).
"""

import argparse
import gc
import importlib.util
import json
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from outerstep.common.quantities import bytes_text
from outerstep.doctor.steps import take_steps
from protocol.spec.run import parse_spec
from worker.box import set_up
from worker.inner.precision import has_float8
from worker.settings import BoxSettings
from worker.starting import start

SPEC = """
name = "inner-steps"
[model]
preset = "{preset}"
[data]
source = "python-stdlib"
sequence_length = {sequence_length}
[inner]
optimizer = "adamw"
batch_size = {batch_size}
learning_rate = 1e-4
[sync]
wait = "always"
rounds = 1
inner_steps = 10
"""
LEAN: dict[str, Any] = {"parameters": "bf16", "optimizer_state": "8bit"}
ROWS: dict[str, dict[str, Any]] = {
    "auto": {},
    "micro-batch 4": {"micro_batch": 4},
    "micro-batch 16": {"micro_batch": 16},
    "micro-batch 64": {"micro_batch": 64},
    "fp16": {"precision": "fp16"},
    "parameters bf16": {"parameters": "bf16"},
    "moments in 8 bits": {"optimizer_state": "8bit"},
    "parameters bf16, moments in 8 bits": LEAN,
    "the same, offloaded": {**LEAN, "offload": True},
    "the same, offloaded, activation checkpointing": {**LEAN, "offload": True, "activation_checkpointing": True},
    "activation checkpointing": {"activation_checkpointing": True},
    "compiled": {"compile": True},
    "compiled, micro-batch 16": {"compile": True, "micro_batch": 16},
    "float8": {"precision": "float8"},
    "compiled, float8": {"precision": "float8", "compile": True},
}
QUICK = ("auto", "micro-batch 4", "activation checkpointing")


@dataclass(frozen=True)
class Row:
    """`at_once`: sequences in the final micro-batch; `mfu`: None if the device's peak is unknown."""

    settings: str
    first_s: float
    step_s: float
    tokens_s: float
    mfu: float | None
    peak_bytes: int | None
    at_once: int


def measure(name: str, spec_text: str, device_name: str) -> Row:
    spec, settings = parse_spec(spec_text), BoxSettings(device=device_name, **ROWS[name])
    device, _ = start(settings)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    torch.compiler.reset()
    box = set_up(spec, settings, device)
    with closing(box.data):
        steps = take_steps(box)
    tokens = spec.inner.batch_size * spec.data.sequence_length
    return Row(name, steps.first_s, steps.step_s, tokens / steps.step_s, steps.mfu, steps.peak_bytes, steps.at_once)


def is_possible(settings: dict[str, Any]) -> bool:
    """Return False for settings that this machine's device, or what is installed, cannot do."""
    if settings.get("precision") == "float8":
        installed = importlib.util.find_spec("torchao") is not None
        return installed and torch.cuda.is_available() and has_float8(torch.device("cuda"))
    return torch.cuda.is_available() or "offload" not in settings


def table(rows: list[Row]) -> Table:
    shown = Table("settings", "at once", "first step: s", "step: s", "tokens/s", "MFU", "peak memory")
    for each in rows:
        mfu = "" if each.mfu is None else f"{each.mfu:.1%}"
        peak = "" if each.peak_bytes is None else bytes_text(each.peak_bytes)
        measured = f"{each.first_s:.2f}", f"{each.step_s:.3f}", f"{each.tokens_s:,.0f}"
        shown.add_row(each.settings, str(each.at_once), *measured, mfu, peak)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inner_steps", description="The speed of inner steps.")
    parser.add_argument("--quick", action="store_true", help="the tiny model and a few rows")
    parser.add_argument("--json", action="store_true", help="one line of JSON, last")
    parser.add_argument("--preset", default="llama-150m")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--rows", type=lambda text: text.split(";"), help="default: all that the device can take")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    chosen = options.rows or (QUICK if options.quick else [each for each in ROWS if is_possible(ROWS[each])])
    if unknown := [each for each in chosen if each not in ROWS]:
        parser.error(f"no row is called {unknown[0]!r}; there are: {', '.join(ROWS)}")
    shape = {"preset": options.preset, "batch_size": options.batch_size, "sequence_length": options.sequence_length}
    if options.quick:
        shape = {"preset": "tiny", "batch_size": 4, "sequence_length": 64}
    text = SPEC.format(**shape)
    rows = []
    for name in chosen:
        rows.append(measure(name, text, options.device))
        print(rows[-1], flush=True)
    Console().print(table(rows))
    if options.json:
        facts = {"benchmark": "inner_steps", "torch": torch.__version__, **shape}
        if torch.cuda.is_available():
            facts["device"] = torch.cuda.get_device_name()
        print(json.dumps({**facts, "rows": [asdict(each) for each in rows]}))


if __name__ == "__main__":
    main()
