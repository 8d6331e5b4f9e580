"""`python -m tests.soak --minutes N`: a soak of about N minutes, its report as JSON on stdout. Exit code 1: faults."""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from tests.soak.soak import DECADE, Plan, show, soak
from tests.soak.verdict import TARGET, report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15, help="about how long (default: 15)")
    parser.add_argument("--seed", type=int, default=1, help="draws kills and faults (default: 1)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and namespaces are cleaned up
    round_s = min(max(options.minutes * 60 / DECADE / 1.2, 5.0), 120.0)
    rounds = max(DECADE, round(options.minutes * 60 / (1.2 * round_s)))
    plan = Plan(options.seed, rounds, round_s)
    show(f"{rounds} rounds of {round_s:.0f} s and more")
    with tempfile.TemporaryDirectory(prefix="outerstep-soak-") as folder:
        outcome = soak(plan, Path(folder), patience_s=3 * rounds * round_s + 300, say=show)
        figures = report(outcome)
    print(json.dumps(figures, indent=2))
    if round_s >= 60:  # in shorter rounds a restart weighs too much
        show(f"goodput {figures['goodput']:.1%}, target {TARGET:.0%}")
    return 1 if figures["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
