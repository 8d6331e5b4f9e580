"""About two minutes of the soak, bounded by rounds; `make soak MINUTES=n` is longer. And that its verdict can fail."""

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import lines
from tests.soak.soak import WORKERS, Outcome, Plan, show, soak
from tests.soak.verdict import faults, lost_contributions, report, wrong_units

# What the verdict must see, whatever came in which round: SQL -> what it says.
TAMPERINGS = {
    "DELETE FROM contributions WHERE rowid = (SELECT min(rowid) FROM contributions)": "acknowledged",
    "UPDATE fragments SET contributors = '{\"nobody\": 1}' WHERE rowid = (SELECT max(rowid) FROM fragments)": "nobody",
    "UPDATE unit_ranges SET start = start + 1 WHERE start = (SELECT max(start) FROM unit_ranges)": "are lost",
    "UPDATE unit_ranges SET start = -1 WHERE start = 0": "are doubled",
    "UPDATE unit_ranges SET state = 'assigned' WHERE start = (SELECT max(start) FROM unit_ranges)": "still assigned",
}


def after(outcome: Outcome, tampering: str) -> list[str]:
    """What the verdict would be, had the database come to this."""
    with sqlite3.connect(outcome.data_dir / "outerstep.db") as database:
        database.execute("PRAGMA ignore_check_constraints = ON")  # which would not let it come to this
        database.execute(tampering)
        found = lost_contributions(database) + wrong_units(database)
        database.rollback()
    return found


@pytest.mark.system
@pytest.mark.timeout(900)
def test_kills_of_both_sides_broken_lines_and_flipped_bits_lose_nothing(tmp_path: Path) -> None:
    outcome = soak(Plan(seed=3, rounds=8, round_s=5), tmp_path / "soak", patience_s=600, say=show)
    show(str(report(outcome)))  # which line conditions ran, among others
    assert faults(outcome) == []
    for tampering, said in TAMPERINGS.items():
        assert any(said in fault for fault in after(outcome, tampering)), tampering
    assert {whom for _, whom in outcome.kills} == {*WORKERS, "coordinator"}
    assert outcome.harm.keys() >= {"cut", "stall", "corrupt"}


@pytest.mark.system
def test_slow_lines_carry_bytes_and_count_them() -> None:
    """A skip says that the soak ran without them."""
    if reason := lines.why_not():
        pytest.skip(f"the soak has no slow lines here: {reason}")
    sent = os.urandom(300_000)
    fetch = "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
    fetch += "while piece := s.recv(1 << 16): sys.stdout.buffer.write(piece)"
    with lines.slow_lines(["far"], lines.Rate(2_000, 10_000, 5)) as far:
        line = far["far"]
        with socket.create_server((line.address, 0)) as server:
            port = str(server.getsockname()[1])
            command = [*line.prefix, sys.executable, "-c", fetch, line.address, port]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as fetching:
                connection, _ = server.accept()
                with connection:
                    connection.sendall(sent)
                received, _ = fetching.communicate()
        assert received == sent
        up, down = line.wire_bytes()
    assert down > len(sent) > up > 0


def test_a_plan_kills_each_worker_once_and_the_coordinator_twice_per_decade() -> None:
    kills = Plan(seed=1, rounds=30, round_s=60).kills()
    for decade in range(3):
        victims = [whom for at, whom in kills if 10 * decade <= at < 10 * decade + 10]
        assert sorted(victims) == sorted([*WORKERS, "coordinator", "coordinator"])
    assert kills == Plan(seed=1, rounds=30, round_s=60).kills()


def test_a_machine_without_root_or_tools_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "nft" else tool)
    assert lines.why_not() == "no nft (Debian: apt install nftables)"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert lines.why_not() == "not root"
