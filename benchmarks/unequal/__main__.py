"""`python -m benchmarks.unequal`; see the package's docstring."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

import benchmarks.unequal
from benchmarks.unequal import product
from benchmarks.unequal.loop import (
    EQUAL,
    FASTEST,
    SPEEDS,
    H,
    HeLoCo,
    Loop,
    RadialDirectional,
    corrected,
    decayed,
    delayed_nesterov,
    in_absences,
    in_rounds,
    mean,
    tokens,
)


@dataclass(frozen=True)
class Result:
    """`units`: inner steps of all workers together. `loss`: held-out, nats per byte."""

    row: str
    seed: int
    units: int
    loss: float


def _synchronous(loop: Loop) -> None:
    loop.train_synchronously(round(loop.rounds * H * sum(SPEEDS) / len(SPEEDS)))


BASELINE, REST = "equal speeds", "without the slowest"
ROWS: dict[str, tuple[tuple[float, ...], Callable[[Loop], None]]] = {
    BASELINE: (EQUAL, lambda loop: in_rounds(loop, 1, tokens, mean)),
    REST: (FASTEST, lambda loop: in_rounds(loop, 1, tokens, mean)),
    "synchronous": (SPEEDS, _synchronous),
    "every round": (SPEEDS, lambda loop: in_rounds(loop, 1, tokens, mean)),
    "every round, RDA": (SPEEDS, lambda loop: in_rounds(loop, 1, tokens, RadialDirectional(loop.sizes))),
    "from 10 steps": (SPEEDS, lambda loop: in_rounds(loop, 10, tokens, mean)),
    "from 10 steps, less the missed mean": (SPEEDS, lambda loop: in_rounds(loop, 10, corrected, mean)),
    "from 50 steps": (SPEEDS, lambda loop: in_rounds(loop, H, tokens, mean)),
    "from 50 steps, decayed": (SPEEDS, lambda loop: in_rounds(loop, H, decayed, mean)),
    "from 50 steps, less the missed mean": (SPEEDS, lambda loop: in_rounds(loop, H, corrected, mean)),
    "from 50 steps, HeLoCo": (SPEEDS, lambda loop: in_rounds(loop, H, HeLoCo(loop.sizes), mean)),
    "from 50 steps, RDA": (SPEEDS, lambda loop: in_rounds(loop, H, tokens, RadialDirectional(loop.sizes))),
    "no rounds, delayed Nesterov": (SPEEDS, delayed_nesterov),
}


WORKERS = (1.0,) * 4
UNDISTURBED = "never away"
ABSENCES: dict[str, tuple[tuple[float, ...], Callable[[Loop], None]]] = {
    UNDISTURBED: (WORKERS, lambda loop: in_rounds(loop, 1, tokens, mean)),
    **{
        f"away for {away}, trains {min(most, away + 1)} H": (WORKERS, partial(in_absences, away=away, most=most))
        for away, mosts in {1: (1, 2), 3: (1, 2, 4), 7: (1, 4, 8), 15: (1, 4, 16)}.items()
        for most in mosts
    },
    **{
        f"one of 4 cut off for {away}, trains {min(most, away + 1)} H": (
            WORKERS,
            partial(in_absences, away=away, most=most, cut_off=1),
        )
        for away, mosts in {3: (1, 4), 15: (1, 4, 16)}.items()
        for most in mosts
    },
}


def measure(row: str, rounds: int, seed: int) -> Result:
    speeds, train = (ROWS | ABSENCES)[row]
    loop = Loop(speeds, rounds, seed)
    train(loop)
    return Result(row, seed, loop.trained, loop.loss())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.unequal",
        description=benchmarks.unequal.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these rows")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--absences", action="store_true", help="a coordinator that is away, instead of slow boxes")
    kinds.add_argument("--product", action="store_true", help="real workers and a real coordinator")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true", help="print one JSON line after the table")
    arguments = parser.parse_args()
    known = list(product.ROWS if arguments.product else ROWS | ABSENCES)
    if unknown := [row for row in arguments.only or [] if row not in known]:
        parser.error(f"unknown row {unknown[0]!r}: choose from {', '.join(known)}")
    wanted = arguments.only or (known if arguments.product else list(ABSENCES if arguments.absences else ROWS))
    torch.set_num_threads(1)
    if arguments.product:
        _measure_product(wanted, arguments.rounds, arguments.seeds, as_json=arguments.json)
        return
    results = []
    for seed in range(arguments.seeds):
        for row in wanted:
            began = time.monotonic()
            results.append(measure(row, arguments.rounds, seed))
            print(f"{results[-1]} in {time.monotonic() - began:.0f} s", flush=True)
    Console(width=120).print(_table(results))
    if arguments.json:
        rows = [asdict(each) for each in results]
        print(json.dumps({"benchmark": "unequal", "rounds": arguments.rounds, "results": rows}))


def _measure_product(rows: list[str], rounds: int, seeds: int, *, as_json: bool) -> None:
    found = []
    for seed in range(seeds):
        for row in rows:
            found.append(product.measure(row, rounds, seed))
            print(found[-1], flush=True)
    table = Table("row", "seed", "s", "inner steps", "held-out loss", "contributions, the fastest first")
    for each in found:
        counts = ", ".join(map(str, each.contributions))
        table.add_row(each.row, str(each.seed), f"{each.seconds:.0f}", f"{each.units:,}", f"{each.loss:.4f}", counts)
    Console(width=120).print(table)
    if as_json:
        print(json.dumps({"benchmark": "unequal, product", "rounds": rounds, "rows": [asdict(each) for each in found]}))


def _table(results: list[Result]) -> Table:
    bases = [each for each in (BASELINE, REST, UNDISTURBED) if any(result.row == each for result in results)]
    table = Table("row", "inner steps", "held-out loss", *(f"above {each}" for each in bases))
    by_row: dict[str, list[Result]] = {}
    for each in results:
        by_row.setdefault(each.row, []).append(each)
    for row, own in by_row.items():
        above = [_above(own, by_row[other]) for other in bases]
        loss = statistics.mean(each.loss for each in own)
        table.add_row(row, f"{own[0].units:,}", f"{loss:.4f}", *above)
    return table


def _above(own: list[Result], others: list[Result]) -> str:
    """Return by how much the loss is above that of another row with the same seeds, on average."""
    return f"{statistics.mean(a.loss / b.loss - 1 for a, b in zip(own, others, strict=True)):+.2%}"


if __name__ == "__main__":
    main()
