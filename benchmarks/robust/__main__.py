"""The quality that hostile and broken workers cost, by aggregation rule: DiLoCo in one process.

    python -m benchmarks.robust [--workers 4] [--hostile 1] [--rules screened] [--attacks undo,...] [--quick] [--json]

There is no network, but the parts are the real ones: the model `tiny` on the standard library's sources, the worker's
inner step, codecs, error feedback and outer step, the coordinator's judging and its means. The hostile workers, one or
two of eight by default, replace their honest pseudo-gradients, in every round except as noted:

  x1e6, x100-once, x10, x1.2    multiplied by this factor ("once": in round 4 only)
  noise-x10, noise-x3.9, noise   of random direction, with this multiple of an honest one's norm
  flipped, flipped-x3            with the sign changed, and three times the norm
  half-flipped, third-flipped,   with the sign of this share of the values changed, always the same ones, and this many
  quarter-flipped, tenth-flipped times the norm
  undo                           the last two deltas negated, and noise
  hold-8-x15, hold-2-x1.5,       misses 7 (1, 2) rounds of 8 (2, 3), then contributes with this multiple of the norm
  hold-3-half-flipped-x1.5
  zeros                          nothing is trained
  less-the-mean                  the negated mean of the honest ones, with half the norm (Xie, Koyejo, Gupta 2019)
  a-little                       the honest mean minus a standard deviation of each value, all the same (Baruch, Baruch,
                                 Goldberg 2019)
  bias                           honest, plus the same vector with half the norm from all

Harm is the held-out loss, nats per byte, minus that of a run in which all are honest. A worker whose contributions are
left out costs the gain of its work: "away" shows that, on the same units. "Refused" counts honest contributions that
did not count in full.

Then the time of one fragment of 8 M elements from 8 workers, by rule: the aggregation compared with the plain mean's,
and the acceptance of a contribution compared with its check alone.
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.faults import WORKERS
from benchmarks.robust.attacks import ATTACKS, AWAY
from benchmarks.robust.real import Size as RealSize
from benchmarks.robust.rows import ROWS, SHORT, complete, table_of
from benchmarks.robust.timing import timed
from benchmarks.robust.training import FULL, QUICK, Size, run
from protocol.spec.sections import SyncSpec
from worker.data.open_training_set import TextData

RULES: tuple[str, ...] = get_args(SyncSpec.model_fields["aggregation"].annotation)

REAL = """Runs on a real coordinator, over HTTP, whose hostile workers know the defences.

A hostile worker computes the update that raises the next state's held-out loss most, by projected gradient ascent on
public text, 1.2 times as long as its honest pseudo-gradient, without the component that it shares with the others, and
mixes in the share C of its honest one (ascent.py). 16 rounds of 25 inner steps, `tiny`, 1 of 4 unless the row's name
says otherwise, C = 0.5. "absent" is the same run without the hostile workers. "above" is the target's figure: at most
0.02. "left out" names the rounds in which hostile workers did not count in full; "honest left out" must be 0.

  accusations     asked for the effect of contributions, hostile workers blame an honest one
  slow            C is raised until the next state's loss does not rise: what a detector of rises does not see
  masked          a small step along the update does no harm, only a whole one
  ahead           raises the loss at the point that the next round starts from, where momentum leads; C is raised until
                  the next state's loss is what it would be without the worker
  within 0.01     raises the next state's loss by 0.01 above what it would be without the worker
  late            the work misses every second round, and comes with the next one
  free rider      sends the last delta and noise; "credit" is the mean factor of hostile contributions
  backdoor        some of the attacker's sequences have a trigger and a target; "target" is the target's loss after the
                  trigger, nats per byte
"""


def measure(size: Size, elements: int, given: argparse.Namespace) -> dict[str, Any]:
    """Return all figures. `elements`: of the timed fragment."""
    rows, times_s = [], {}
    for codec in given.codecs:
        data = TextData(size.spec(given.seed, "mean", codec))
        clean = run(size.spec(given.seed, "mean", codec), data, None, 0, given.workers).loss
        assert clean is not None, "nobody attacks"
        for rule in given.rules:
            cases = [(None, 0), *((attack, count) for count in given.hostile for attack in (AWAY, *given.attacks))]
            for attack, count in cases:
                result = run(size.spec(given.seed, rule, codec), data, attack, count, given.workers)
                row = {"codec": codec, "rule": rule, "attack": attack or "nobody", "hostile": count}
                harm = None if result.loss is None else result.loss - clean
                rows.append(row | {**asdict(result), "harm": harm})
                counted = f"{result.left_out} of {result.attacking} left out, {result.refused} honest ones not in full"
                print(f"{codec}, {rule}, {count} × {attack}: {_signed(harm)}; {counted}", file=sys.stderr, flush=True)
        times_s[codec] = timed(elements, codec, RULES)
    return {
        "benchmark": "robust",
        "seed": given.seed,
        "workers": given.workers,
        **asdict(size),
        "elements": elements,
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "rows": rows,
        "times_s": times_s,
    }


def _signed(harm: float | None) -> str:
    return "the run ends" if harm is None else f"{harm:+.4f}"


def tables(result: dict[str, Any]) -> list[Table]:
    steps = f"{result['rounds']} rounds of {result['inner_steps']} inner steps"
    shown = Table(title=f"{result['workers']} workers, {steps}; seed {result['seed']}", title_justify="left")
    for name in ("codec", "rule", "hostile", "attack"):
        shown.add_column(name)
    for name in ("loss", "harm", "refused of honest", "left out of hostile"):
        shown.add_column(name, justify="right")
    for row in result["rows"]:
        shown.add_row(
            *(row["codec"], row["rule"], str(row["hostile"]), row["attack"]),
            "–" if row["loss"] is None else f"{row['loss']:.4f}",
            _signed(row["harm"]),
            str(row["refused"]),
            f"{row['left_out']} of {row['attacking']}" if row["attacking"] else "",
        )
    timed_ = Table(title=f"milliseconds, {result['elements']:,} elements, 8 workers", title_justify="left")
    timed_.add_column("codec")
    for name in ("rule", "aggregation", "× mean"):
        timed_.add_column(name, justify="right")
    for codec, seconds in result["times_s"].items():
        for name, each in seconds.items():
            against = seconds["checked" if name == "found" else "mean"]
            timed_.add_row(codec, name, f"{1000 * each:.1f}", "" if name == "checked" else f"{each / against:.2f}")
    return [shown, timed_]


def _named(text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"unknown name {name}: choose from {', '.join(known)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.robust", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    codecs = ["int8", "ternary", "sparse"]
    parser.add_argument("--rules", type=partial(_named, known=RULES), default=["mean", "screened"])
    parser.add_argument("--codecs", type=partial(_named, known=codecs), default=["int8"])
    parser.add_argument("--attacks", type=partial(_named, known=list(ATTACKS)), default=list(ATTACKS))
    parser.add_argument("--workers", type=int, default=WORKERS, help=f"how many there are; default {WORKERS}")
    parser.add_argument("--hostile", type=int, nargs="+", default=[1, 2], help="how many of them attack; default 1 2")
    parser.add_argument("--seed", type=int, default=0, help="of the model, the data and the attacks")
    parser.add_argument("--quick", action="store_true", help="hardly any training, which shows only that it works")
    parser.add_argument("--json", action="store_true", help="add one line of JSON with all figures")
    real = parser.add_subparsers(dest="what").add_parser(
        "real", help="on a real coordinator", description=REAL, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    named = {row.name: row for row in ROWS}
    real.add_argument("--rows", nargs="+", choices=named, default=list(named), metavar="NAME", help="; ".join(named))
    real.add_argument(
        "--guard", default="pause", choices=["tell", "pause", "rollback"], help="guard.action of the runs"
    )
    real.add_argument("--results", type=Path, help="file of JSON lines, to go on from after an interruption")
    real.add_argument("--rounds", type=int, default=RealSize.rounds)
    real.add_argument("--seed", type=int, default=0)
    real.add_argument("--quick", action="store_true", help="hardly any training, which shows only that it works")
    real.add_argument("--json", action="store_true", help="add one line of JSON with all figures")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "real":
        rows = [named[name] for name in given.rows]
        played = SHORT if given.quick else RealSize(given.rounds)
        outcomes = complete(rows, played, given.seed, given.guard, given.results)
        Console(width=160).print(table_of(rows, outcomes))
        if given.json:
            print(json.dumps({name: asdict(each) for name, each in outcomes.items()}))
        return
    size, elements = (QUICK, 1 << 18) if given.quick else (FULL, 1 << 23)
    result = measure(size, elements, given)
    for table in tables(result):
        Console(width=132).print(table)
    if given.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
