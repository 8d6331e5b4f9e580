"""What attacks on a coordinator cost the honest training that goes on meanwhile: rounds per second and memory before,
during and after each attack.

    python -m benchmarks.siege [--only ATTACK ...] [--quick] [--json]

The coordinator has default settings and may open 1,024 files. Two workers, scripts with `DiLoCo`, spend 0.2 s of a
round in inner steps. The run has a history of 1,000 rounds. The attackers run on this machine with low priority, each
from addresses that no worker uses. They reconnect as soon as they are disconnected, and ignore rejections.

To pass: during an attack rounds take at most 1.5 times as long, memory is at most twice as large, and no lease is lost;
afterwards rounds are as fast as before.
"""

import argparse
import json
import os
import platform
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.siege.attacks import ROWS
from benchmarks.siege.besieged import FULL, QUICK, Size, besieged

MAX_SLOWER, MAX_LARGER, MAX_SLOWER_AFTER = 1.5, 2.0, 1.15


def measure(names: list[str], size: Size, *, quick: bool) -> list[dict[str, Any]]:
    """Return the figures of each attack, each on a new coordinator."""
    rows = []
    for name in names:
        row = ROWS[name]
        with besieged(size) as made:
            rows.append(judged(made.attack(name, row.quick if quick else row.at_once)))
        print(_summary(rows[-1]), file=sys.stderr, flush=True)
    return rows


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row, and whether it has passed."""
    lost = sum(row[span]["lost_leases"] for span in ("before", "during", "after"))
    after = row["before"]["rounds_per_s"] / max(row["after"]["rounds_per_s"], 1e-9)
    within = row["slower"] <= MAX_SLOWER and row["larger"] <= MAX_LARGER and after <= MAX_SLOWER_AFTER
    return {**row, "lost_leases": lost, "slower_after": after, "passed": within and not lost}


def _summary(row: dict[str, Any]) -> str:
    return f"{row['attack']}: {row['slower']:.2f} × as long, {row['larger']:.2f} × the memory"


def table(rows: list[dict[str, Any]]) -> Table:
    shown = Table(title=f"to pass: {MAX_SLOWER} × as long, {MAX_LARGER} × the memory, at most", title_justify="left")
    shown.add_column("attack")
    for name in ("rounds/s", "during", "after", "× as long", "MB", "during", "×", "leases lost"):
        shown.add_column(name, justify="right")
    shown.add_column("answered")
    shown.add_column("")
    for row in rows:
        spans = [row[name] for name in ("before", "during", "after")]
        shown.add_row(
            row["attack"],
            *(f"{span['rounds_per_s']:.2f}" for span in spans),
            f"{row['slower']:.2f}",
            *(f"{span['peak_rss'] / 1e6:.0f}" for span in spans[:2]),
            f"{row['larger']:.2f}",
            str(row["lost_leases"]),
            ", ".join(f"{count:,} × {status}" for status, count in sorted(row["answered"].items())),
            "passed" if row["passed"] else "FAILED",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.siege", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ATTACK", help=", ".join(ROWS))
    parser.add_argument("--quick", action="store_true", help="a few seconds each; shows only that it works")
    parser.add_argument("--json", action="store_true", help="add one line of JSON with all figures")
    given = parser.parse_args()
    rows = measure(given.only, QUICK if given.quick else FULL, quick=given.quick)
    Console(width=160).print(table(rows))
    if given.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        print(json.dumps({"benchmark": "siege", **machine, "rows": rows}))


if __name__ == "__main__":
    main()
