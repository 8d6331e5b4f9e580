"""Run seeds of the simulation.

python -m tests.simulation 17              one seed, with what happened in it
python -m tests.simulation --seeds 100000  many; prints the failing ones, each with the command that replays it
"""

import argparse
import sys

from tests.simulation.many import REPLAY, Summary, many
from tests.simulation.simulation import simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("seed", nargs="?", type=int, help="the one seed to run")
    parser.add_argument("--seeds", type=int, help="run so many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, help="processes at once; one per CPU by default")
    given = parser.parse_args()
    if (given.seed is None) == (given.seeds is None):
        parser.error("give one seed, or --seeds")
    if given.seed is not None:
        report = simulate(given.seed)
        print(report)
        return int(report.failure is not None)
    summary = Summary()
    for report in many(range(given.first, given.first + given.seeds), given.jobs):
        summary.add(report)
        if report.failure is not None:
            print(f"\rseed {report.seed}: {report.failure}\n    replay: {REPLAY.format(seed=report.seed)}", flush=True)
        if sys.stderr.isatty() or summary.seeds % 100 == 0:
            print(f"\r{summary.line()}", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    print(f"\n{summary.text()}")
    return int(summary.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
