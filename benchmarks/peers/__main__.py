"""One sync of 4 workers on loopback: Outerstep, gloo, torchft, hivemind and Flower, in the same run.

    python -m benchmarks.peers [--quick] [--json] [--params 100e6] [--only torchft hivemind flower]

A sync lasts from pseudo-gradients in memory to their mean in memory, on all workers. Reported are the median after a
warm-up, bytes per worker, and the error of the mean. Outerstep's and gloo's come from `benchmarks/sync.py`. Each peer
has a script here, written like its own examples. What precedes a sync (quorum, matchmaking) is reported separately, as
Outerstep's sync also starts with the assignment known.

Peers are installed from PyPI when first needed, each into a separate environment under $XDG_CACHE_HOME or ~/.cache. A
peer that cannot be installed, or fails, is in the table with the reason. Bytes are counted in a network namespace,
which needs root; otherwise the table shows a dash.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.peers.comparison import Row, compared, missing_row, own_rows, peer_row, table
from benchmarks.peers.environments import Unavailable, cache, namespace, prepare, run

WORKERS = 4
PEERS = ("torchft", "hivemind", "flower")
LIMIT_S = 900


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="4 M parameters, fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON line after the table")
    parser.add_argument("--params", type=float, help="parameters; default 100e6, with --quick 4e6")
    parser.add_argument("--only", choices=PEERS, nargs="+", default=PEERS, help="these peers; default all")
    arguments = parser.parse_args()
    elements = int(arguments.params or (4e6 if arguments.quick else 100e6))
    rounds = 3 if arguments.quick else 5
    # A sync of Flower takes ten times as long as the others' or more.
    rounds_of = {"flower": 1 if arguments.quick else 2}

    # First, so that nothing is installed during a measurement.
    pythons = {peer: _prepared(peer) for peer in arguments.only}
    prefix, load_before = namespace(), os.getloadavg()[0]
    rows = _own(prefix, elements, rounds)
    for peer, python in pythons.items():
        rows.append(_peer(peer, python, prefix, elements, rounds_of.get(peer, rounds)))
    load_after = os.getloadavg()[0]

    systems = compared(rows)
    title = f"one sync of {WORKERS} workers on loopback; load {load_before:.1f} before, {load_after:.1f} after"
    Console(width=160).print(table(systems, title))
    if arguments.json:
        document = {
            "benchmark": "peers",
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "workers": WORKERS,
            "load": [load_before, load_after],
            "systems": systems,
        }
        print(json.dumps(document))


def _prepared(peer: str) -> Path | Unavailable:
    try:
        return prepare(peer)
    except Unavailable as reason:
        return reason


def _own(prefix: list[str], elements: int, rounds: int) -> list[Row]:
    command = [*prefix, sys.executable, "-m", "benchmarks.sync", "--only", "speed", "--json"]
    command += ["--params", str(elements), "--workers", str(WORKERS), "--rounds", str(rounds)]
    return own_rows(run(command, cache() / "outerstep.log", LIMIT_S)["rounds"][0], rounds)


def _peer(peer: str, python: Path | Unavailable, prefix: list[str], elements: int, rounds: int) -> Row:
    if isinstance(python, Unavailable):
        return missing_row(peer, elements, str(python))
    command = [*prefix, str(python), "-m", f"benchmarks.peers.{peer}_peer"]
    command += ["--params", str(elements), "--workers", str(WORKERS), "--rounds", str(rounds)]
    try:
        report = run(command, cache() / f"{peer}.log", LIMIT_S)
    except Unavailable as reason:
        return missing_row(peer, elements, str(reason))
    return peer_row(peer, elements, WORKERS, report, own_loopback=bool(prefix))


if __name__ == "__main__":
    main()
