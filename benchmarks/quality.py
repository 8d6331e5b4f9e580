"""The quality that codecs and overlap cost, and that inner optimizers gain: the demo's run with other settings.

    python -m benchmarks.quality [--quick] [--json] [--only NAME …] [--seeds 1] [--rounds 24]

Each line is a real run: a coordinator and 4 worker processes, the model `tiny` on the standard library's sources, 40
inner steps a round. `loss` is the held-out loss of the last state, nats per byte, `above` its difference from fp32 up
and down with the same seed; `waited` the share of the workers' time in which training waited for a sync, on this
machine, whose cores they share. Nothing in a run depends on timing, so it is reproducible bit for bit.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outerstep.demo import DemoPlan, run_demo
from outerstep.demo.spec import ROUNDS, demo_spec
from outerstep.live_view import display_for

WORKERS = 4
QUICK = ("int8", "eager")

# name -> keys of [sync], or with their section; defaults: int8 both ways, classic, AdamW with a cosine
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"upload_codec": "fp32", "download_codec": "fp32"},
    "int8": {},
    "int4": {"upload_codec": "int4", "download_codec": "int4"},
    "2bit up, int4 down": {"upload_codec": "2bit", "download_codec": "int4"},
    "ternary up, int4 down": {"upload_codec": "ternary", "download_codec": "int4"},
    "overlap 5": {"overlap": 5},
    "overlap 5, alpha 0": {"overlap": 5, "alpha": 0.0},
    "overlap 5, alpha 0.5": {"overlap": 5, "alpha": 0.5},
    "spread": {"offsets": "spread"},
    "spread, overlap 5": {"offsets": "spread", "overlap": 5},
    "spread, overlap 5, strided": {"offsets": "spread", "overlap": 5, "fragment_layers": "strided"},
    "eager": {"overlap": "eager"},
    "eager, ternary up, int4 down": {"overlap": "eager", "upload_codec": "ternary", "download_codec": "int4"},
    "muon": {"inner.optimizer": "muon"},
    "muon, twice the rate": {"inner.optimizer": "muon", "inner.muon_learning_rate": 16e-3},
    "muon, int4": {"inner.optimizer": "muon", "upload_codec": "int4", "download_codec": "int4"},
    "muon, ternary up, int4 down": {
        "inner.optimizer": "muon",
        "upload_codec": "ternary",
        "download_codec": "int4",
    },
    "wsd": {"inner.schedule": "wsd"},
    "linear": {"inner.schedule": "linear"},
}


@dataclass(frozen=True)
class Result:
    name: str
    seed: int
    loss: float
    upload_bytes: int
    download_bytes: int
    waited: float
    identical: bool


def spec_of(keys: dict[str, Any], *, rounds: int, seed: int) -> str:
    """Return the demo's spec with these keys; default optimizer: AdamW."""
    sections: dict[str, dict[str, Any]] = {"[sync]": {}, "[inner]": {"optimizer": "adamw"}}
    for name, value in keys.items():
        where, _, key = name.rpartition(".")
        sections[f"[{where or 'sync'}]"][key] = value
    lines, own = [], dict[str, Any]()
    for line in demo_spec(workers=WORKERS, rounds=rounds, codec="int8").splitlines():
        own = sections.get(line, {}) if line.startswith("[") else own
        if line == "seed = 0":
            line = f"seed = {seed}"
        if line.partition(" = ")[0] not in own:
            lines.append(line)
        if line in sections:
            lines += [f"{each} = {json.dumps(value)}" for each, value in own.items()]
    text = "\n".join(lines)
    document = tomllib.loads(text)
    assert all(own.items() <= document[section.strip("[]")].items() for section, own in sections.items())
    return text


def measure(name: str, *, rounds: int, seed: int) -> Result:
    with tempfile.TemporaryDirectory(prefix="outerstep-quality-") as folder:
        spec = spec_of(SETTINGS[name], rounds=rounds, seed=seed)
        summary, _ = run_demo(DemoPlan(WORKERS, spec, Path(folder)), display_for(Console(file=sys.stderr)))
    assert summary.final_loss is not None
    stages = summary.stage_seconds
    waited = stages.get("sync", 0.0) / max(stages.get("sync", 0.0) + stages["train"], 1e-9)
    return Result(
        name,
        seed,
        round(summary.final_loss, 4),
        summary.upload_bytes,
        summary.download_bytes,
        round(waited, 3),
        summary.replicas_identical,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"4 rounds of {' and '.join(QUICK)}")
    parser.add_argument("--json", action="store_true", help="print one JSON line after the table")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, help="these settings", metavar="NAME")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=None, help=f"default {ROUNDS}")
    arguments = parser.parse_args()
    names = arguments.only or (QUICK if arguments.quick else list(SETTINGS))
    rounds = arguments.rounds or (4 if arguments.quick else ROUNDS)
    results = [measure(name, rounds=rounds, seed=seed) for name in names for seed in range(arguments.seeds)]
    _print(results, rounds)
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        print(json.dumps({"benchmark": "quality", **machine, "rounds": rounds, "results": [vars(r) for r in results]}))
    return 0 if all(result.identical for result in results) else 1


def _print(results: list[Result], rounds: int) -> None:
    table = Table(
        *("sync", "loss", "above", "MB up", "MB down", "waited", "replicas"),
        title=f"{WORKERS} workers, {rounds} rounds of 40 inner steps, mean of {len({r.seed for r in results})} seed(s)",
    )
    plain = {result.seed: result.loss for result in results if result.name == "fp32"}
    for name in dict.fromkeys(result.name for result in results):
        these = [result for result in results if result.name == name]
        above = [result.loss - plain[result.seed] for result in these if result.seed in plain]
        table.add_row(
            name,
            f"{statistics.mean(r.loss for r in these):.4f}",
            f"{statistics.mean(above):+.4f}" if above else "–",
            f"{statistics.mean(r.upload_bytes for r in these) / 1e6:.2f}",
            f"{statistics.mean(r.download_bytes for r in these) / 1e6:.2f}",
            f"{statistics.mean(r.waited for r in these):.1%}",
            "identical" if all(r.identical for r in these) else "DIFFERENT",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
