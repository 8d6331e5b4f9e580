"""The command."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

import benchmarks.convergence
from benchmarks.convergence.results import RESULTS, Result, append, read, spec_digest
from benchmarks.convergence.rows import QUICK, QUICK_STEPS, ROWS, STEPS
from benchmarks.convergence.running import measure
from benchmarks.convergence.table import table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=benchmarks.convergence.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} inner steps of {', '.join(QUICK)}")
    parser.add_argument("--json", action="store_true", help="print one JSON line after the table")
    parser.add_argument("--only", nargs="+", choices=ROWS, help="these rows", metavar="ROW")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--results", type=Path, default=None, help="default docs/convergence.jsonl; none with --quick")
    arguments = parser.parse_args(argv)
    steps = QUICK_STEPS if arguments.quick else STEPS
    path = arguments.results or (None if arguments.quick else RESULTS)
    names = arguments.only or (QUICK if arguments.quick else list(ROWS))
    results = list(_results(names, arguments.seeds, steps, path))
    Console(width=140).print(table(results))
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        print(json.dumps({"benchmark": "convergence", **machine, "results": [asdict(each) for each in results]}))
    return 0 if all(result.identical for result in results) else 1


def _results(names: Sequence[str], seeds: Sequence[int], steps: int, path: Path | None) -> Iterator[Result]:
    """Yield the result of each row and seed: from `path` what is there already, which is added to."""
    found = {each.spec: each for each in read(path)} if path is not None else {}
    for seed in seeds:
        for name in names:
            row = ROWS[name]
            result = found.get(spec_digest(row, steps=steps, seed=seed))
            if result is None:
                print(f"{name}, seed {seed}", file=sys.stderr)
                result = measure(name, row, steps=steps, seed=seed)
                if path is not None:
                    append(path, result)
            yield replace(result, row=name)


if __name__ == "__main__":
    sys.exit(main())
