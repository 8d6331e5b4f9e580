"""Long lines: the time of a sync compared with its line's limit and with gloo, and the time left for training.

    python -m benchmarks.wan [--rows A,C,train] [--repeat 5] [--silence 60] [--keep-windows] [--no-gloo] [--json]

Each worker is a process in a separate network namespace behind a line simulated at packet level (harness/lines.py):
rates, a round trip, losses, and the congestion control of both ends. The coordinator is an ordinary process. A row is
one such line (rows.py). Measured are, one after another:

  sync      from the first worker's start to the last one's end, on open connections, each after a silence as long as
            inner steps would take; compared with the line's limit and the row's target
  plain     one TCP transfer of the same size over one of the lines, on a new connection: the slower of up and down
  gloo      an all-reduce of as many fp32 values
  planner   the seconds that `outerstep plan` predicts, and the difference
  core-s    CPU time of a sync on this machine, of all workers, the coordinator and the lines together; divided by its
            cores, it is the least time of a sync here; `--workers 1` shows what the line alone takes

`--keep-windows` sets net.ipv4.tcp_slow_start_after_idle to 0 at both ends, for the rows with CUBIC: by default, the
kernel begins with slow start again after each silence.

`train`: rounds of inner steps of a fixed length (60 s in all) over 500/110 Mbit/s, 60 ms: the share of the workers'
time in inner steps: classic, with an overlap of one of the round's inner steps, and with `sync.wait = "never"`.

`changes`: row A's line; in the middle of a sync one worker's line loses half its rate, or 5 % of its packets for a
minute, or is interrupted for 30 s. Bytes that had arrived must not be sent again.

Needs root, iproute2 and a C compiler, with TLS openssl; exit code 3 if such lines cannot be made.
"""

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.wan import changing
from benchmarks.wan.measuring import WORKERS, Effort, measure, measure_training
from benchmarks.wan.rows import ROWS, chosen
from harness.lines import FRAMING, LEAST_QUEUE_S, MTU, NO_LINES_EXIT, TCP_PAYLOAD, why_not

TRAIN, CHANGES = "train", "changes"
FURTHER = [TRAIN, CHANGES]
TRAINED_PARAMETERS = 25_000_000
QUICK_PART = 20  # divides the parameters and the inner steps' time
CONSOLE = Console(width=240)
LIMIT = (
    f"limit: the slower way's payload × {MTU + FRAMING}/{TCP_PAYLOAD}, with the headers of full packets including "
    f"Ethernet's {FRAMING} bytes, at its rate; queues of a round trip's bytes, at least {1000 * LEAST_QUEUE_S:.0f} ms"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join([*ROWS, *FURTHER]), help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=WORKERS, help="of a row, not of `train`; default %(default)s")
    parser.add_argument("--repeat", type=int, default=5, help="measured syncs per row; default 5")
    parser.add_argument("--silence", type=float, default=60, help="seconds before each sync; default 60")
    parser.add_argument(
        "--keep-windows", action="store_true", help="net.ipv4.tcp_slow_start_after_idle = 0 at both ends"
    )
    parser.add_argument("--no-gloo", action="store_true", help="without gloo's all-reduces, which take longest")
    parser.add_argument(
        "--quick", action="store_true", help="a twentieth of the parameters, one sync, a second's silence"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line after the tables")
    arguments = parser.parse_args()
    try:
        names = chosen(arguments.rows, [*ROWS, *FURTHER])
    except ValueError as error:
        parser.error(str(error))
    tools = ["openssl"] if any(ROWS[name].tls for name in names if name in ROWS) else []
    if reason := why_not(*tools):
        print(f"Slow lines are not available on this machine: {reason}.", file=sys.stderr)
        return NO_LINES_EXIT

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes are cleaned up
    part = QUICK_PART if arguments.quick else 1
    effort = Effort(arguments.workers, arguments.repeat, arguments.silence, 2, arguments.keep_windows)
    if arguments.quick:
        effort = replace(effort, syncs=1, silence_s=1.0, all_reduces=1)
    if arguments.no_gloo:
        effort = replace(effort, all_reduces=0)
    syncs, trained, changed = [], [], []
    for name in names:
        print(f"measuring {name}", file=sys.stderr)
        if name == TRAIN:
            trained = measure_training(TRAINED_PARAMETERS // part, 1 if arguments.quick else 2, 60 / part)
        elif name == CHANGES:
            a = replace(ROWS["A"], parameters=ROWS["A"].parameters // part)
            changes = [replace(each, lasts_s=each.lasts_s / part) for each in changing.CHANGES]
            changed = changing.measure(a, changes, effort.silence_s)
        else:
            row = ROWS[name]
            syncs.append(measure(replace(row, parameters=row.parameters // part), effort))
    show(syncs, trained, changed)
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        print(json.dumps({"benchmark": "wan", **machine, "syncs": syncs, "training": trained, "changes": changed}))
    return 0


def show(
    syncs: Sequence[dict[str, Any]], training: Sequence[dict[str, Any]], changes: Sequence[dict[str, Any]]
) -> None:
    if syncs:
        CONSOLE.print(_syncs(syncs))
        CONSOLE.print(LIMIT, highlight=False)
    if training:
        CONSOLE.print(_training(training))
        for each in training:
            stages = ", ".join(f"{name} {s:.2f}" for name, s in each["stages_s"].items() if name != "train")
            CONSOLE.print(f"{each['kind']}: s per round, some at the same time: {stages}", highlight=False)
    if changes:
        CONSOLE.print(_changes(changes))


def _syncs(rows: Sequence[dict[str, Any]]) -> Table:
    first, syncs = rows[0], len(rows[0]["sync_s"])
    table = Table(
        *("row", "line down/up", "ms", "loss", "TCP", "parameters, codecs", "MB up, down", "on the wire"),
        *("limit s", "plain TCP s", "sync s, worst", "planner", "core-s", "ratio", "excess rt"),
        *("gloo s, ×", "target", "verdict"),
        title=f"one sync, workers: {first['workers']}; {syncs} syncs, each after {first['silence_s']:g} s of silence"
        + (", with windows kept" if first["keep_windows"] else ""),
    )
    for r in rows:
        payload, wire = r["payload_bytes"], r["wire_bytes"]
        table.add_row(
            *(r["row"], f"{r['down_mbit']:g}/{r['up_mbit']:g}", f"{1000 * r['round_trip_s']:.0f}", f"{r['loss']:.1%}"),
            r["tcp"] + (", TLS" if r["tls"] else ""),
            f"{r['parameters'] / 1e6:g} M {r['upload']}/{r['download']}",
            *(f"{each['up'] / 1e6:.2f}, {each['down'] / 1e6:.2f}" for each in (payload, wire)),
            *(f"{r['limit_s']:.2f}", f"{max(r['plain_s'].values()):.2f}", f"{r['median_s']:.2f}, {r['worst_s']:.2f}"),
            f"{r['planned_s']:.2f}, {r['planned_s'] / r['median_s'] - 1:+.0%}",
            f"{r['core_s']:.1f}",
            *(f"{r['ratio']:.2f}", f"{r['excess_round_trips']:.1f}"),
            "–" if r["gloo_s"] is None else f"{r['gloo_s']:.1f}, {r['gloo_s'] / r['median_s']:.1f}",
            *(r["target"], "missed: " + "; ".join(r["missed"]) if r["missed"] else "met"),
        )
    return table


def _training(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        *("training", "line down/up", "ms", "parameters", "inner steps s per round", "overlap s", "other s", "share"),
        *("target", "verdict"),
    )
    for r in rows:
        table.add_row(
            *(r["kind"], f"{r['down_mbit']:g}/{r['up_mbit']:g}", f"{1000 * r['round_trip_s']:.0f}"),
            *(f"{r['parameters'] / 1e6:g} M", f"{r['round_s']:.1f}", f"{r['overlap_s']:.1f}", f"{r['sync_s']:.2f}"),
            *(f"{r['share_in_steps']:.2%}", f"≥ {r['target']:.1%}"),
            "met" if r["share_in_steps"] >= r["target"] else "missed",
        )
    return table


def _changes(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        *("row", "one line, in a sync", "undisturbed s", "floor s", "sync s", "MB up, down", "sent again"),
        title="floor: what the line still carries, at the pace of the undisturbed sync",
    )
    for r in rows:
        payload, again = (r[f"{kind}_bytes"] for kind in ("payload", "repeated"))
        table.add_row(
            *(r["row"], r["change"], *(f"{r[key]:.2f}" for key in ("undisturbed_s", "floor_s", "sync_s"))),
            *(f"{each['up'] / 1e6:.2f}, {each['down'] / 1e6:.2f}" for each in (payload, again)),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
