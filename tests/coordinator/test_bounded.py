"""After many rounds, neither the disk nor the database has grown beyond what the rules allow."""

import pytest

from coordinator.store.tables import (
    AssignmentRow,
    CheckpointFragmentRow,
    CheckpointRow,
    ContributionRow,
    EventRow,
    FragmentRow,
    LateContributionRow,
    RoundRow,
    UnitRangeRow,
)
from coordinator.sync.retention import EVENTS_SLACK, trim_events
from harness.coordinator import InThread
from tests.coordinator.crew import crew, events, info, play_round, problem

ROUNDS = 200
RETENTION = "every_rounds = 5\nkeep = 2\n[retention]\nrounds = 10\nevents = 30"


def rows(running: InThread, run: str) -> dict[str, int]:
    tables = (
        AssignmentRow,
        CheckpointRow,
        CheckpointFragmentRow,
        ContributionRow,
        FragmentRow,
        LateContributionRow,
        UnitRangeRow,
    )
    with running.coordinator.database.read() as session:
        run_id = running.live(run).id
        return {table.__tablename__: session.query(table).filter_by(run_id=run_id).count() for table in tables}


@pytest.mark.covers("reliability:bounded-disk")
@pytest.mark.nightly
def test_files_and_rows_stay_bounded_over_two_hundred_rounds(shared: InThread, run: str) -> None:
    members = crew(shared, run, ["a", "b"], rounds=ROUNDS, min_workers=2, checkpoints=RETENTION)
    live = shared.live(run)
    most_files = 0
    most: dict[str, int] = {}
    for round_ in range(ROUNDS):
        play_round(members, round_)
        if round_ % 10 == 9:
            shared.await_state(run, round_ + 1)
            most_files = max(
                most_files, len(list(live.blobs.list(f"runs/{run}/"))) + len(list(live.outer.files.folder.iterdir()))
            )
            most = {table: max(count, most.get(table, 0)) for table, count in rows(shared, run).items()}
    shared.await_state(run, ROUNDS)
    # per round: 2 fragments, 2 workers; at most 15 rounds of history and 10 rounds of deltas
    assert most_files <= 2 * (2 + 2 + 10 + 2 * 6)
    assert most["contributions"] <= 4 * 16
    assert most["fragments"] <= 2 * 16
    assert most["assignments"] <= 2 * 16
    assert most["checkpoints"] <= 2
    assert most["unit_ranges"] <= 8 + 2 * 5  # one more for each round that the run can go back behind
    trim_events(live)
    assert len(info(shared, run, "/events?limit=1000")["items"]) <= 30 + EVENTS_SLACK

    disk = info(shared, run)["disk_bytes"]
    assert 0 < sum(disk.values()) < 200_000
    assert disk["set_aside"] == 0
    with shared.coordinator.database.read() as session:
        assert session.query(RoundRow).filter_by(run_id=live.id).count() == ROUNDS
    first = info(shared, run, "/rounds/0")
    assert (first["tokens"], first["loss"], first["fragments"], first["state"]) == (10 * 32, 1.5, [], "published")
    assert first["upload_bytes"] > first["delta_bytes"] > 0
    detail = info(shared, run)
    assert detail["tokens"] == ROUNDS * 10 * 32 == sum(w["tokens"] for w in info(shared, run, "/workers")["items"])
    assert [worker["contributions"] for worker in info(shared, run, "/workers")["items"]] == [ROUNDS, ROUNDS]
    assert detail["upload_bytes"] == sum(each["upload_bytes"] for each in info(shared, run, "/workers")["items"])
    problem(members[0].delta(0, 0), "gone")
    assert [event["data"]["epoch"] for event in events(shared, run, "epoch-broken")] == []
    assert info(shared, run, "/units")["items"][0]["consumed"] == 1000


@pytest.mark.covers("security:event-flooding")
def test_events_are_trimmed_to_the_newest(shared: InThread, run: str) -> None:
    crew(shared, run, ["a"], checkpoints=RETENTION)
    live = shared.live(run)
    with live.change() as change:
        for number in range(EVENTS_SLACK + 100):
            change.record("test", f"event {number}")
    shared.coordinator.tick()
    with shared.coordinator.database.read() as session:
        kept = session.query(EventRow).filter_by(run_id=live.id).order_by(EventRow.id).all()
    assert [row.message for row in kept] == [f"event {number}" for number in range(570, 600)]
