"""`python -m benchmarks.frontier`; see the package's docstring."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import benchmarks.frontier
from benchmarks.frontier.measuring import RESULTS, Result, results_of
from benchmarks.frontier.rows import ROWS, SYNCHRONOUS


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frontier",
        description=benchmarks.frontier.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=3000, help="inner steps of each worker, a multiple of 50")
    parser.add_argument("--only", nargs="+", choices=ROWS, help="these rows", metavar="ROW")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="rows at once, each on one core")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--json", action="store_true", help="print one JSON line after the table")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device cuda: torch {torch.__version__} finds no GPU here")
    names = arguments.only or list(ROWS)
    results = list(
        results_of(names, arguments.steps, arguments.seeds, arguments.results, arguments.jobs, arguments.device)
    )
    Console(width=130).print(_table(results))
    if arguments.json:
        print(json.dumps({"benchmark": "frontier", "results": [asdict(each) for each in results]}))
    return 0


def _table(results: list[Result]) -> Table:
    table = Table("row", "seed", "rounds", "loss", "above", "mean of 8", "above", "MB up", "MB down", "bytes")
    base = {each.seed: each for each in results if each.row == SYNCHRONOUS}
    for each in results:
        beside = base.get(each.seed)
        table.add_row(
            each.row,
            str(each.seed),
            str(each.rounds),
            f"{each.loss:.4f}",
            "" if beside is None else f"{math.expm1(each.loss - beside.loss):+.1%}",
            f"{each.mean_loss:.4f}",
            "" if beside is None else f"{math.expm1(each.mean_loss - beside.mean_loss):+.1%}",
            f"{each.upload_bytes / 1e6:.2f}",
            f"{each.download_bytes / 1e6:.2f}",
            "" if each.factor is None else f"1/{each.factor:,.0f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
