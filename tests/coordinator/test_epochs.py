"""The view of the work units by epoch, and the check that each was trained on exactly once."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.run.units.epochs import coverage_fault
from coordinator.store.tables import UnitRangeRow
from harness import member as member_module
from harness.coordinator import InThread
from protocol.messages import DataSummary
from tests.coordinator.crew import assigned, crew, events, info, play_round, step_all

pytestmark = pytest.mark.slow


@pytest.fixture
def small_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training set of 12 units: an epoch is over after 2.4 contributions of 5."""
    monkeypatch.setattr(member_module, "DATA", DataSummary(digest="cd" * 32, units=12))


@pytest.mark.covers("reliability:units-once")
def test_the_pool_is_shown_by_epoch_and_checked_when_an_epoch_is_over(
    shared: InThread, run: str, small_data: None
) -> None:
    members = a, b = crew(shared, run, ["a", "b"], rounds=5, min_workers=2)
    assert info(shared, run, "/units") == {"items": [], "next": None}
    assigned(members, 0)
    assert info(shared, run, "/units")["items"] == [
        {"worker": None, "epoch": 0, "first": 0, "units": 12, "consumed": 0, "assigned": {"a": 5, "b": 5}, "free": 2}
    ]
    a.take_part(0)
    assert info(shared, run, "/units")["items"] == [
        {"worker": None, "epoch": 0, "first": 0, "units": 12, "consumed": 5, "assigned": {"b": 5}, "free": 2}
    ]
    ranges = info(shared, run, "/units/ranges?limit=1")
    assert ranges["items"] == [
        {"start": 0, "stop": 5, "state": "consumed", "worker": "a", "round": 0, "consumed_round": 0}
    ]
    assert info(shared, run, f"/units/ranges?after={ranges['next']}") == {
        "items": [{"start": 5, "stop": 10, "state": "assigned", "worker": "b", "round": 0, "consumed_round": None}],
        "next": None,
    }
    assert [each["start"] for each in info(shared, run, "/units/ranges?after=4")["items"]] == [0, 5]
    b.take_part(0)
    step_all(members, 0)
    for round_ in range(1, 5):
        play_round(members, round_)
    first = info(shared, run, "/units?limit=2")
    assert [(each["epoch"], each["consumed"], each["free"]) for each in first["items"]] == [(4, 2, 10), (3, 12, 0)]
    assert [each["first"] for each in first["items"]] == [48, 36]
    rest = info(shared, run, f"/units?after={first['next']}")
    assert [(each["epoch"], each["consumed"]) for each in rest["items"]] == [(2, 12), (1, 12), (0, 12)]
    assert [event["data"]["epoch"] for event in events(shared, run, "epoch-complete")] == [0, 1, 2, 3]
    assert events(shared, run, "epoch-broken") == []
    with shared.coordinator.database.read() as session:
        assert session.query(UnitRangeRow).filter_by(run_id=shared.live(run).id).count() <= 5, (
            "those of a round are joined"
        )


def test_units_that_come_back_keep_their_epoch_open_until_somebody_has_trained_on_them(
    shared: InThread, run: str, small_data: None
) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=5)
    assigned([a, b], 0)
    b.take_part(0)
    a.http.delete(a.path()).raise_for_status()
    b.step(0)
    assert b.take_part(1).units == [[0, 5]]
    b.step(1)
    assert events(shared, run, "epoch-complete") == []
    assert b.take_part(2).units == [[10, 15]]
    b.step(2)
    assert len(events(shared, run, "epoch-complete")) == 1


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        pytest.param("UPDATE unit_ranges SET start = 1 WHERE start = 0 AND run_id = {}", "units [0, 1) were never trained on", id="gap"),
        pytest.param("UPDATE unit_ranges SET stop = stop + 1 WHERE start = 0 AND run_id = {}", "were trained on twice", id="overlap"),
        pytest.param("UPDATE runs SET tokens = tokens + 32 WHERE id = {}", "contributions contained 16", id="ledger"),
    ],
)  # fmt: skip
def test_a_broken_epoch_is_told(shared: InThread, run: str, small_data: None, statement: str, said: str) -> None:
    members = crew(shared, run, ["a"], rounds=3)
    for round_ in range(2):
        play_round(members, round_)
    live = shared.live(run)
    with live.lock, shared.coordinator.database.write() as session:
        session.connection().exec_driver_sql(statement.format(live.id))
    members[0].assignment(2)
    play_round(members, 2)
    (event,) = events(shared, run, "epoch-broken")
    assert said in event["message"]


@given(st.lists(st.integers(0, 60), min_size=2, max_size=12, unique=True))
def test_what_covers_an_epoch_exactly_is_found_right(cuts: list[int]) -> None:
    bounds = sorted(cuts)
    ranges = list(itertools.pairwise(bounds))
    start, stop = bounds[0], bounds[-1]
    assert coverage_fault(ranges, start, stop) is None
    assert coverage_fault(ranges, start - 1, stop) == f"units [{start - 1}, {start}) were never trained on"
    assert coverage_fault(ranges[:-1], start, stop) == f"units [{bounds[-2]}, {stop}) were never trained on"
    assert "twice" in (coverage_fault([*ranges, (stop - 1, stop)], start, stop) or "")
