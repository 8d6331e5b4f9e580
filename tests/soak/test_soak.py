"""About two minutes of the soak, bounded by rounds; `make soak MINUTES=n` is longer. And that its verdict can fail."""

import socket
import sqlite3
from pathlib import Path

import pytest

from tests.soak.proxy import Proxy
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


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_kills_of_both_sides_broken_lines_and_flipped_bits_lose_nothing(tmp_path: Path) -> None:
    outcome = soak(Plan(seed=3, rounds=8, round_s=5), tmp_path / "soak", patience_s=600, say=show)
    show(str(report(outcome)))  # which line conditions ran, among others
    assert faults(outcome) == []
    for tampering, said in TAMPERINGS.items():
        assert any(said in fault for fault in after(outcome, tampering)), tampering
    assert {whom for _, whom in outcome.kills} == {*WORKERS, "coordinator"}
    assert outcome.harm.keys() >= {"cut", "stall", "corrupt"}


def test_the_end_of_a_proxy_ends_its_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with Proxy(server.getsockname()[1], 0, mean_bytes=1000, delay_s=0) as proxy:
            address = proxy.listen("127.0.0.1", "w")
            near = socket.create_connection(address)
            far, _ = server.accept()
        with near, far:
            assert near.recv(1) == far.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


def test_a_plan_kills_each_worker_once_and_the_coordinator_twice_per_decade() -> None:
    kills = Plan(seed=1, rounds=30, round_s=60).kills()
    for decade in range(3):
        victims = [whom for at, whom in kills if 10 * decade <= at < 10 * decade + 10]
        assert sorted(victims) == sorted([*WORKERS, "coordinator", "coordinator"])
    assert kills == Plan(seed=1, rounds=30, round_s=60).kills()
