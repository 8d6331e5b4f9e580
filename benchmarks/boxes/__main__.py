"""`python -m benchmarks.boxes`; see the package's docstring."""

import argparse
import json
import math
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import benchmarks.boxes
from benchmarks.boxes import loop, real
from benchmarks.boxes.rows import (
    BOXES,
    LINES,
    MODELS,
    NEAR,
    OVER_A_LINE,
    QUICK,
    SYNCS,
    TARGETS,
    TROUBLE,
    TROUBLE_MEMBERS,
    Results,
    Size,
    equal_length,
    search,
    spec_of,
    speeds_of,
)
from benchmarks.boxes.troubles import TROUBLES
from harness.lines import NO_LINES_EXIT, why_not

FIRST = {"1": 0.9, "1,1": 0.75}  # lengths to begin the search with
OTHERS = 0.85
TOO_SLOW = 1.2  # times `step_s`


class Floor:
    """Rows of `floor`: shares of the time of *alone*, in virtual time. `delay`: the share of a round that a sync
    takes."""

    def __init__(self, size: Size, results: Results, delay: float = 0.0) -> None:
        self._size, self._results, self._delay = size, results, delay

    def alone(self, seed: int) -> float:
        """Return the held-out loss of *alone*."""
        spec = spec_of(self._size, self._size.rounds, seed)
        return float(self._results.of({"alone": seed, **asdict(self._size)}, lambda: loop.alone(spec)))

    def share(self, boxes: str, seed: int) -> float | None:
        """Return the share of the time of *alone* at which the boxes have its loss; None if none was found."""

        def loss(rounds: int) -> float:
            spec = spec_of(self._size, rounds, seed)
            key = {"floor": boxes, "seed": seed, "length": rounds, "delay": self._delay, **asdict(self._size)}
            return float(self._results.of(key, lambda: loop.together(spec, speeds_of(boxes), self._delay))[0])

        rounds = _rounds(self._size, boxes, self.alone(seed), lambda count: (count, loss(count)))
        return None if rounds is None else rounds / self._size.rounds


class Real:
    """Rows of `real`."""

    def __init__(self, size: Size, results: Results) -> None:
        self._size, self._results, self._floor = size, results, Floor(size, results)

    def run(
        self, boxes: str, rounds: int, seed: int, sync: str, line: str, trouble: str | None = None
    ) -> dict[str, Any]:
        """Return what a run has measured. `trouble`: one of TROUBLES, or "none" to compare with them; None: the leases
        and the graces are the default ones."""
        key = {"boxes": boxes, "length": rounds, "seed": seed, "sync": sync, "line": line, "trouble": trouble}

        def measure() -> dict[str, Any]:
            found = real.measure(
                *(speeds_of(boxes), self._size, rounds, seed),
                sync=sync,
                line=line,
                members=TROUBLE_MEMBERS if trouble is not None else "",
                trouble=TROUBLES.get(trouble or ""),
                small_disks=trouble == "disk full",
            )
            print(f"{key}: {found}", file=sys.stderr, flush=True)
            steps = found.tokens / self._size.tokens_per_step
            step_s = found.in_steps * found.seconds * sum(speeds_of(boxes)) / steps
            if step_s > TOO_SLOW * self._size.step_s:
                print(f"an inner step took {step_s:.2f} s: this machine is too slow for this row", file=sys.stderr)
            return asdict(found)

        result: dict[str, Any] = self._results.of({**key, **asdict(self._size)}, measure)
        return result

    def share(self, boxes: str, seed: int, sync: str, line: str) -> tuple[float | None, dict[str, Any]]:
        """Return the share of the time of *alone* at which the boxes have its loss, and the longest of the measured
        runs."""
        found: list[dict[str, Any]] = []

        def measure(rounds: int) -> tuple[float, float]:
            found.append(self.run(boxes, rounds, seed, sync, line))
            finished = found[-1]["finished"]
            return found[-1]["seconds"], found[-1]["loss"] if finished else math.inf

        seconds = _rounds(self._size, boxes, self._floor.alone(seed), measure)
        longest = max(found, key=lambda each: each["seconds"])
        return None if seconds is None else seconds / self._size.alone_s, longest


def _rounds(size: Size, boxes: str, wanted: float, measure: Any) -> float | None:
    """Return the length with the loss `wanted`. `measure` takes rounds and returns (length, loss)."""
    lengths: dict[int, tuple[float, float]] = {}

    def loss(share: float) -> float:
        rounds = max(round(share * size.rounds), 1)
        if rounds not in lengths:
            lengths[rounds] = measure(rounds)
        return lengths[rounds][1]

    search(wanted, FIRST.get(boxes, OTHERS), loss)
    return equal_length(wanted, list(lengths.values()))


def _mean(shares: list[float | None]) -> str:
    known = [each for each in shares if each is not None]
    if len(known) < len(shares):
        return "not reached"
    spread = f" ± {(max(known) - min(known)) / 2:.3f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.3f}{spread}"


def _floor(given: argparse.Namespace, size: Size, results: Results) -> tuple[Table, list[dict[str, Any]]]:
    floor, rows = Floor(size, results, given.delay), []
    table = Table("boxes", "share of the time alone", "target")
    for boxes in given.boxes:
        shares = [floor.share(boxes, seed) for seed in range(given.seeds)]
        rows.append({"boxes": boxes, "shares": shares})
        table.add_row(boxes, _mean(shares), f"{TARGETS[boxes]:.2f}" if boxes in TARGETS else "")
    return table, rows


def _real(given: argparse.Namespace, size: Size, results: Results) -> tuple[Table, list[dict[str, Any]]]:
    bench, rows = Real(size, results), []
    table = Table("boxes", "line", "sync", "share of the time alone", "target", "in steps", "MB up, down", "tokens")
    for boxes in given.boxes:
        for line in given.line:
            for sync in given.sync:
                found = [bench.share(boxes, seed, sync, line) for seed in range(given.seeds)]
                longest = found[0][1]
                rows.append(
                    {"boxes": boxes, "line": line, "sync": sync, "shares": [each for each, _ in found], **longest}
                )
                most = TARGETS.get(boxes, 0.0) + (0.0 if line == "none" else OVER_A_LINE)
                table.add_row(
                    *(boxes, line, sync, _mean([each for each, _ in found])),
                    f"{most:.2f}" if boxes in TARGETS else "",
                    f"{longest['in_steps']:.0%}",
                    f"{longest['up'] / 1e6:.1f}, {longest['down'] / 1e6:.1f}",
                    f"{longest['tokens']:,}",
                )
    return table, rows


def _trouble(given: argparse.Namespace, size: Size, results: Results) -> tuple[Table, list[dict[str, Any]]]:
    bench, rows, half = Real(size, results), [], size.rounds // 2
    table = Table("trouble", "sync", "s per round", "of the healthy box's", "longest round, s", "loss", "left out")
    for sync in given.sync:
        line = NEAR
        healthy = bench.run("1", size.rounds, 0, sync, line, "none")
        usual = statistics.mean(healthy["rounds_s"][half:])
        for name in ("one box", *(given.troubles or TROUBLES)):
            found = healthy if name == "one box" else bench.run("1,1", size.rounds, 0, sync, line, name)
            after = found["rounds_s"][half:]
            rows.append({"trouble": name, "sync": sync, "share": statistics.mean(after) / usual, **found})
            table.add_row(
                *(name, sync, f"{statistics.mean(after):.2f}", f"{statistics.mean(after) / usual:.2f}"),
                *(f"{max(after):.1f}", f"{found['loss']:.4f}", str(found["left_out"].get("box-1", 0))),
            )
    return table, rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.boxes",
        description=benchmarks.boxes.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(dest="what", required=True)
    for name in ("floor", "real", "trouble"):
        kind = kinds.add_parser(name)
        kind.add_argument("--quick", action="store_true", help="hardly any training, which shows only that it works")
        kind.add_argument("--results", type=Path, help="file of JSON lines, to go on from after an interruption")
        kind.add_argument("--json", action="store_true", help="add one line of JSON with all figures")
        if name == "trouble":
            kind.add_argument("troubles", nargs="*", metavar="NAME", help=f"default: all of {', '.join(TROUBLES)}")
        else:
            kind.add_argument("--boxes", nargs="+", default=BOXES, help=f"default: {' '.join(BOXES)}")
            kind.add_argument("--seeds", type=int, default=1)
            kind.add_argument("--model", choices=MODELS, default="tiny")
            kind.add_argument("--rounds", type=int, default=Size.rounds, help="alone; default: %(default)s")
            kind.add_argument("--momentum", type=float, help="of the outer optimizer")
        if name == "floor":
            kind.add_argument("--delay", type=float, default=0.0, help="the share of a round that a sync takes: 0.5")
        if name == "real":
            kind.add_argument("--line", nargs="+", choices=LINES, default=["none"])
            kind.add_argument(
                "--step-s", type=float, default=Size.step_s, help="of the fastest box; default: %(default)s"
            )
        if name != "floor":
            kind.add_argument("--sync", nargs="+", choices=SYNCS, default=["default"])
    given = parser.parse_args()
    needs_lines = given.what == "trouble" or (given.what == "real" and given.line != ["none"])
    if needs_lines and (reason := why_not()) is not None:
        print(f"lines cannot be made here: {reason}", file=sys.stderr)
        sys.exit(NO_LINES_EXIT)
    if unknown := set(getattr(given, "troubles", [])) - TROUBLES.keys():
        parser.error(f"unknown trouble {min(unknown)!r}: choose from {', '.join(TROUBLES)}")
    torch.set_num_threads(1)
    tables = {"floor": _floor, "real": _real, "trouble": _trouble}
    size = QUICK if given.quick else TROUBLE if given.what == "trouble" else Size()
    if given.what == "real" and not given.quick:
        size = replace(size, step_s=given.step_s)
    if given.what != "trouble":
        rounds = size.rounds if given.quick else given.rounds
        size = replace(size, model=given.model, rounds=rounds, momentum=given.momentum)
    table, rows = tables[given.what](given, size, Results(given.results))
    Console(width=132).print(table)
    if given.json:
        print(json.dumps({"benchmark": f"boxes {given.what}", "rows": rows}))


if __name__ == "__main__":
    main()
