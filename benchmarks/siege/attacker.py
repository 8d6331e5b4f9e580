"""The process that makes one attack; in the end it prints what came of it, one line of JSON. Its priority is low: where
coordinator, workers and attackers share a machine, their work is not to be what the others lack."""

import argparse
import asyncio
import itertools
import os
import resource

from benchmarks.siege.attacks import ROWS, Target, attack_for, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("at_once", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("port", type=int)
    for name in ("run", "worker_token", "viewer_token"):
        parser.add_argument(name)
    parser.add_argument("exchanged_tokens", nargs="+")
    given = parser.parse_args()
    os.nice(19)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    target = Target(
        given.port, given.run, given.worker_token, given.viewer_token, itertools.cycle(given.exchanged_tokens)
    )
    asyncio.run(attack_for(target, ROWS[given.row], given.at_once, given.seconds))
    print(told(target), flush=True)


if __name__ == "__main__":
    main()
