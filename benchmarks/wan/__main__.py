"""Long lines: the time of a sync against what its line allows and against others, and what is left for training.

    python -m benchmarks.wan [--rows A,C,train] [--repeat 5] [--silence 60] [--peers gloo,torchft,hivemind] [--json]

Each worker is a process in a network namespace of its own, behind a line at packet level (harness/lines.py): rates, a
round trip, losses, and the congestion control of both ends. The coordinator is a process as anybody would start it. A
row is one such line (rows.py), and of it are measured, one after the other:

  sync      from the first worker's start to the last one's end, on connections that are there, each after a silence as
            long as inner steps would take; against the line's limit and the row's target
  plain     one TCP transfer of as many bytes over one of the lines, on a new connection: the slower of up and down
  others    the same mean by gloo in fp32, and by torchft and hivemind where --peers names them
  planner   the seconds that `outerstep plan` says, and by how much they differ
  core-s    what a sync keeps this machine's cores busy for, all workers, the coordinator and the lines together:
            divided by its cores, the least that the sync takes here; `--workers 1` tells what the line alone takes

`train`: rounds of inner steps of a fixed length (60 s in all) over 500/110 Mbit/s, 60 ms: the share of the workers'
time that is spent in inner steps; classic, and with an overlap of one of the round's inner steps.

`changes`: row A's line; in the middle of a sync one worker's loses half its rate, or 5 % of its packets for a minute,
or is gone for 30 s. What had arrived is not to be sent again.

Needs root, iproute2 and a C compiler, with TLS openssl; exit code 3 where such lines cannot be made.
"""

import argparse
import json
import os
import platform
import signal
import sys
from dataclasses import replace

from benchmarks.wan import changing, training
from benchmarks.wan.measuring import WORKERS, Effort, measure
from benchmarks.wan.peers import PEERS
from benchmarks.wan.rows import ROWS, chosen
from benchmarks.wan.showing import show
from harness.lines import NO_LINES_EXIT, why_not

TRAIN, CHANGES = "train", "changes"
FURTHER = [TRAIN, CHANGES]
TRAINED_PARAMETERS = 25_000_000
QUICK_PART = 20  # of the parameters, and of the inner steps' time: one in so many


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join([*ROWS, *FURTHER]), help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=WORKERS, help="of a row, not of `train`; default %(default)s")
    parser.add_argument("--repeat", type=int, default=5, help="measured syncs per row; default 5")
    parser.add_argument("--silence", type=float, default=60, help="seconds before each sync; default 60")
    parser.add_argument("--peers", default="gloo", help=f"of {','.join(PEERS)}; default gloo")
    parser.add_argument(
        "--quick", action="store_true", help="a twentieth of the parameters, one sync, a second's silence"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line after the tables")
    arguments = parser.parse_args()
    try:
        names, others = chosen(arguments.rows, [*ROWS, *FURTHER]), chosen(arguments.peers, PEERS)
    except ValueError as error:
        parser.error(str(error))
    tools = ["openssl"] if any(ROWS[name].tls for name in names if name in ROWS) else []
    if reason := why_not(*tools):
        print(f"There are no slow lines on this machine: {reason}.", file=sys.stderr)
        return NO_LINES_EXIT

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes are cleaned up
    part = QUICK_PART if arguments.quick else 1
    effort = Effort(arguments.workers, arguments.repeat, arguments.silence, 2)
    if arguments.quick:
        effort = replace(effort, syncs=1, silence_s=1.0, others=1)
    syncs, trained, changed = [], [], []
    for name in names:
        print(f"measuring {name}", file=sys.stderr)
        if name == TRAIN:
            trained = training.measure(TRAINED_PARAMETERS // part, 1 if arguments.quick else 2, 60 / part)
        elif name == CHANGES:
            a = replace(ROWS["A"], parameters=ROWS["A"].parameters // part)
            changes = [replace(each, lasts_s=each.lasts_s / part) for each in changing.CHANGES]
            changed = changing.measure(a, changes, effort.silence_s)
        else:
            row = ROWS[name]
            syncs.append(measure(replace(row, parameters=row.parameters // part), effort, others))
    show(syncs, trained, changed)
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        print(json.dumps({"benchmark": "wan", **machine, "syncs": syncs, "training": trained, "changes": changed}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
