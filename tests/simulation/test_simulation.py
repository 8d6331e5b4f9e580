"""Seeded schedules of joins, leaves, crashes, power losses, partitions and more: every invariant holds after every step.

A failure prints the command that replays it.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.simulation.many import REPLAY, Summary, many
from tests.simulation.seeds import DONE_AGAIN, FIXED, head, of_commit
from tests.simulation.simulation import Report, simulate


def summed(reports: Iterable[Report]) -> Summary:
    """What happened under the seeds; AssertionError where an invariant did not hold."""
    summary, failures = Summary(), []
    for report in reports:
        summary.add(report)
        if report.failure is not None:
            failures.append(f"{report.failure}\n    replay it: {REPLAY.format(seed=report.seed)}")
    assert not failures, "\n" + "\n".join(failures)
    return summary


@pytest.mark.system
@pytest.mark.timeout(900)
def test_the_invariants_hold_under_every_seed(say: Callable[[str], None]) -> None:
    commit = head(Path(__file__).parent)
    drawn = of_commit(commit)
    whose = "no commit" if commit is None else f"commit {commit[:12]}"
    say(f"simulated seeds {FIXED.start} to {FIXED[-1]} and, by {whose}, {drawn.start} to {drawn[-1]}; replay those:")
    say(f"    python -m tests.simulation --first {drawn.start} --seeds {len(drawn)}")
    summary = summed(many([*FIXED, *DONE_AGAIN, *drawn]))
    say(summary.text())
    unseen = [fault for fault in EVERY_FAULT if not summary.faults[fault]]
    assert not unseen, f"these faults never happened: {unseen}"


EVERY_FAULT = (
    *("crash before an fsync", "crash after an fsync", "crash before a commit", "crash after a commit"),
    *("worker kill", "worker power", "stop_worker", "new_worker", "evict", "pause", "suspend", "freeze_coordinator"),
    *("lost", "answer lost", "cut upload", "cut download", "damaged upload", "damaged download", "twice", "proxy"),
    *("partition", "fill_disk", "slow_disk", "impostor"),
    *("hostile contributed scaled", "hostile contributed flipped", "hostile contributed zeros"),
    *("hostile contributed noise", "hostile held units back", "hostile was refused", "hostile accused"),
    "rounds done again",
    *("database_down", "commit lost", "reply of a commit lost", "statement lost", "stop_machine", "tasks done"),
    *("cut_off_from_the_database", "cut_off_from_the_store", "coordinator gone for good", "terms"),
)


@pytest.mark.system
def test_a_seed_is_replayed_exactly_in_another_process() -> None:
    """Also where Python hashes strings differently: nothing may depend on the order of a set."""
    here = simulate(5)
    command = [sys.executable, "-m", "tests.simulation", "5"]
    for hash_seed in ("1", "2"):
        there = subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=False
        )
        assert f"trace={here.trace!r}" in there.stdout, there.stdout + there.stderr
