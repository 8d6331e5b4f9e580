"""Work units in a real database: whatever is assigned, returned and consumed, in whatever order."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.run.units.ledger import (
    assign_units,
    assigned_units,
    consume_units,
    count_by_round,
    merge_adjacent,
    reclaim_units,
    return_forgotten_units,
    return_units,
    unconsume_units,
)
from coordinator.run.units.pools import Pool
from coordinator.store import sqlite
from coordinator.store.database import Database
from coordinator.store.tables import RunRow, UnitRangeRow
from protocol.errors import Problem


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    database = Database(sqlite.url_in(tmp_path_factory.mktemp("units")))
    yield database
    database.close()


@pytest.fixture
def session(database: Database) -> Iterator[Session]:
    """A session that is never committed: every test begins with an empty database."""
    with database.read() as session:
        yield session


@pytest.fixture
def run(session: Session) -> RunRow:
    """A run, of which worker a was assigned the units 0 to 5 in round 0."""
    run = new_run(session)
    assert assign_units(session, Pool(run), "a", 0, 5) == [(0, 5)]
    return run


def new_run(session: Session) -> RunRow:
    run = RunRow(
        name="r", spec_toml="", spec_digest=b"", spec={}, state="running", created_at=0.0, round=0, next_unit=0
    )  # fmt: skip
    session.add(run)
    session.flush()
    return run


def states(session: Session) -> dict[int, tuple[str, str | None]]:
    """Unit -> (state, worker). Fails where two ranges overlap."""
    found: dict[int, tuple[str, str | None]] = {}
    for row in session.scalars(select(UnitRangeRow)):
        for unit in range(row.start, row.stop):
            assert unit not in found, f"unit {unit} is in two ranges"
            found[unit] = (row.state, row.worker)
    return found


def as_lists(ranges: list[tuple[int, int]]) -> list[list[int]]:
    return [list(each) for each in ranges]


workers = st.sampled_from(["a", "b", "c"])
operations = st.lists(
    st.one_of(
        st.tuples(st.just("assign"), workers, st.integers(1, 7)),
        st.tuples(st.just("return"), workers, st.just(0)),
        st.tuples(st.just("consume"), workers, st.integers(0, 3)),
        st.tuples(st.just("hand in a part"), workers, st.integers(1, 3)),
        st.tuples(st.just("next round"), st.just(""), st.just(0)),
    ),
    max_size=40,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations)
def test_every_unit_is_in_exactly_one_state_whatever_happens(database: Database, operations: list) -> None:
    with database.read() as session:
        run = new_run(session)
        expected: dict[int, tuple[str, str | None]] = {}
        held: dict[str, list[tuple[int, int]]] = {"a": [], "b": [], "c": []}
        round_ = 0
        for what, worker, n in operations:
            if what == "assign":
                units = assign_units(session, Pool(run), worker, round_, n)
                given_units = [unit for start, stop in units for unit in range(start, stop)]
                assert len(given_units) == n
                assert all(expected.get(unit, ("new",))[0] in ("new", "free") for unit in given_units)
                free = {unit for unit, (state, _) in expected.items() if state == "free"}
                assert not free - set(given_units) or free > set(given_units), "new units before returned ones"
                expected.update(dict.fromkeys(given_units, ("assigned", worker)))
                held[worker] += units
            elif what == "return":
                return_units(session, run.id, worker)
                expected.update({unit: ("free", None) for unit, at in expected.items() if at == ("assigned", worker)})
                held[worker] = []
            elif what == "consume":
                chosen, held[worker] = held[worker][:n], held[worker][n:]
                count = consume_units(session, run.id, worker, round_, as_lists(chosen))
                units_of = [unit for start, stop in chosen for unit in range(start, stop)]
                assert count == len(units_of)
                expected.update(dict.fromkeys(units_of, ("consumed", worker)))
            elif what == "hand in a part":
                (start, stop), *others = held[worker] or [(0, 0)]
                part = (start, min(stop, start + n))
                if part[0] < part[1]:
                    assert consume_units(session, run.id, worker, round_, [part]) == part[1] - start
                    expected.update(dict.fromkeys(range(*part), ("consumed", worker)))
                    held[worker] = [(part[1], stop), *others] if part[1] < stop else others
            else:
                round_ += 1
                merge_adjacent(session, run.id, round_)
                expected.update({unit: (state, None) for unit, (state, _) in expected.items() if state == "consumed"})
                kinds = [(row.state, row.start, row.stop) for row in session.scalars(select(UnitRangeRow))]
                settled = [kind for kind in sorted(kinds, key=lambda kind: kind[1]) if kind[0] != "assigned"]
                for (state, _, stop), (other, start, _) in itertools.pairwise(settled):
                    assert (state, stop) != (other, start), "adjacent ranges of one kind"
            session.flush()
            assert states(session) == expected
            assert sorted(expected) == list(range(run.next_unit)), "a unit was skipped"


def test_units_that_came_back_go_out_first_and_a_range_is_cut_where_only_a_part_is_wanted(
    session: Session, run: RunRow
) -> None:
    assert assign_units(session, Pool(run), "b", 0, 5) == [(5, 10)]
    return_units(session, run.id, "a")
    assert assign_units(session, Pool(run), "c", 0, 3) == [(0, 3)]
    assert assign_units(session, Pool(run), "b", 1, 4) == [(3, 5), (10, 12)]
    assert assigned_units(session, run.id, "b", 1) == [(3, 5), (10, 12)]
    assert run.next_unit == 12


def test_all_fragments_of_one_contribution_may_name_the_same_units_but_no_later_one_may(
    session: Session, run: RunRow
) -> None:
    assert consume_units(session, run.id, "a", 0, [[0, 5]]) == 5
    assert consume_units(session, run.id, "a", 0, [[0, 5]]) == 0, "for the first time"
    with pytest.raises(Problem, match="used before"):
        consume_units(session, run.id, "a", 1, [[0, 5]])
    return_units(session, run.id, "a")
    assert assigned_units(session, run.id, "a", 0) == [(0, 5)]
    assert assign_units(session, Pool(run), "b", 0, 5) == [(5, 10)], "they never go back to the pool"


@pytest.mark.covers("security:untrained-units")
@pytest.mark.parametrize(
    ("worker", "units"),
    [
        pytest.param("b", [[0, 5]], id="of another worker"),
        pytest.param("a", [[1, 5]], id="from within a range"),
        pytest.param("a", [[0, 2], [1, 3]], id="twice in part"),
        pytest.param("a", [[0, 2], [3, 5]], id="in pieces"),
        pytest.param("a", [[0, 5], [0, 5]], id="listed twice"),
        pytest.param("a", [[0, 5], [5, 10]], id="one that was never assigned"),
        pytest.param("a", [[(1 << 63) - 2, (1 << 63) - 1]], id="absurd numbers"),
        pytest.param("a", [[2 * i, 2 * i + 1] for i in range(1 << 16)], id="more ranges than SQLite has parameters"),
    ],
)
def test_units_that_a_worker_does_not_hold_are_refused(session: Session, run: RunRow, worker: str, units: list) -> None:
    with pytest.raises(Problem) as refused:
        consume_units(session, run.id, worker, 0, units)
    assert refused.value.slug == "units-not-held"
    assert len(refused.value.detail) < 200


def test_a_part_that_is_handed_in_leaves_the_rest_assigned_and_then_returns_it(session: Session, run: RunRow) -> None:
    assert consume_units(session, run.id, "a", 0, [[0, 2]]) == 2
    assert consume_units(session, run.id, "a", 0, [[0, 2]]) == 0, "another fragment of the same contribution"
    assert assigned_units(session, run.id, "a", 0) == [(0, 5)]
    return_units(session, run.id, "a")
    assert assign_units(session, Pool(run), "b", 1, 4) == [(2, 6)]


def test_units_of_a_lost_contribution_are_held_again_or_back_in_the_pool(session: Session, run: RunRow) -> None:
    assign_units(session, Pool(run), "b", 0, 5)
    consume_units(session, run.id, "a", 0, [[0, 5]])
    consume_units(session, run.id, "b", 0, [[5, 10]])
    assert unconsume_units(session, run.id, "a", 0, live=True) == 5
    assert unconsume_units(session, run.id, "b", 0, live=False) == 5
    assert states(session) == {
        **dict.fromkeys(range(5), ("assigned", "a")),
        **dict.fromkeys(range(5, 10), ("free", None)),
    }


def test_units_of_carried_work_that_went_back_to_the_pool_are_held_again(session: Session, run: RunRow) -> None:
    return_units(session, run.id, "a")  # it left, with late work on units 1 to 3
    reclaim_units(session, Pool(run), "a", 1, [[1, 2], [2, 4]])
    assert states(session) == {
        **dict.fromkeys([0, 4], ("free", None)),
        **dict.fromkeys([1, 2, 3], ("assigned", "a")),
    }
    assert assigned_units(session, run.id, "a", 1) == [], "they are of an earlier round"
    reclaim_units(session, Pool(run), "a", 1, [[1, 4]])
    assert consume_units(session, run.id, "a", 1, [[1, 4]]) == 3
    reclaim_units(session, Pool(run), "a", 1, [[1, 4]])  # of its contribution to this round, other fragments may follow


@pytest.mark.parametrize(
    ("happened", "carried"),
    [
        pytest.param("dealt to another", [[0, 5]], id="dealt to another worker"),
        pytest.param("dealt to itself", [[0, 5]], id="dealt to itself once more"),
        pytest.param("dealt to another", [[4, 6]], id="one that nobody was ever given"),
        pytest.param("nothing", [[0, 2], [1, 3]], id="listed twice"),
        pytest.param("consumed", [[0, 5]], id="consumed in an earlier round"),
    ],
)
def test_work_whose_units_are_not_the_workers_any_more_is_refused(
    session: Session, run: RunRow, happened: str, carried: list
) -> None:
    """Found by simulation seed 50756: a worker that had left and come back carried work on a unit that was dealt to it
    again; it trained on it a second time."""
    if happened == "consumed":
        consume_units(session, run.id, "a", 0, [[0, 5]])
    else:
        return_units(session, run.id, "a")
    if happened.startswith("dealt"):
        assign_units(session, Pool(run), "b" if happened == "dealt to another" else "a", 1, 5)
    with pytest.raises(Problem) as refused:
        reclaim_units(session, Pool(run), "a", 1, carried)
    assert refused.value.slug == "units-not-held"


@pytest.mark.covers("security:hoarded-units")
def test_units_of_missed_rounds_return_to_the_pool_but_not_those_of_carried_work(session: Session, run: RunRow) -> None:
    """Found by simulation seed 46: a slow worker is given units of every round that opens, but takes part in every other
    one only; the units of the others were nobody's while it lived."""
    for round_ in range(1, 4):
        assign_units(session, Pool(run), "a", round_, 5)
    return_forgotten_units(session, run.id, "a", 3, [[0, 5], [5, 7]])  # round 0 was late, and so was a part of round 1
    assert states(session) == {
        **dict.fromkeys(range(7), ("assigned", "a")),
        **dict.fromkeys(range(7, 15), ("free", None)),
        **dict.fromkeys(range(15, 20), ("assigned", "a")),
    }
    return_forgotten_units(session, run.id, "a", 3, [])
    assert states(session) == {
        **dict.fromkeys(range(15), ("free", None)),
        **dict.fromkeys(range(15, 20), ("assigned", "a")),
    }


def test_the_units_of_a_contribution_are_counted_by_the_round_that_they_were_assigned_for(
    session: Session, run: RunRow
) -> None:
    assign_units(session, Pool(run), "b", 0, 5)  # 5 to 10
    assign_units(session, Pool(run), "a", 1, 5)  # 10 to 15
    session.flush()
    assert count_by_round(session, run.id, "a", 1, [[0, 5], [10, 13]]) == {0: 5, 1: 3}
    assert count_by_round(session, run.id, "a", 1, [[3, 12]]) == {0: 2, 1: 2}, "those of b are not its own"
    assert list(count_by_round(session, run.id, "a", 1, [[5, 10], [500, 505]])) == [], "no round that it has none of"
    consume_units(session, run.id, "a", 1, [[0, 5], [10, 13]])
    session.flush()
    assert count_by_round(session, run.id, "a", 1, [[0, 5], [10, 13]]) == {0: 5, 1: 3}, "of its other fragments"
    assert count_by_round(session, run.id, "a", 2, [[0, 5], [13, 15]]) == {1: 2}, "spent"
    return_units(session, run.id, "a")
    reclaim_units(session, Pool(run), "a", 3, [[13, 15]])
    session.flush()
    assert count_by_round(session, run.id, "a", 3, [[13, 15]]) == {2: 2}, "claimed again in round 3"
