"""About two minutes of the soak, bounded by rounds; `make soak MINUTES=n` is longer. And that its verdict can fail."""

import sqlite3
from pathlib import Path

import pytest

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
