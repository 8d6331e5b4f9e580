"""Each worker its own H, where the spec says so."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.run.step_rates import StepRates, inner_steps
from harness.coordinator import InThread, SettableClock
from harness.member import Member, spec_toml
from protocol.errors import SpecError
from protocol.spec.run import parse_spec
from protocol.spec.sections import SyncSpec
from tests.coordinator.crew import enlist, info, recovered
from tests.coordinator.test_restart import Lives

AUTO = SyncSpec(
    rounds=1, inner_steps="auto", round_s=10, nominal_inner_steps=40, min_inner_steps=5, max_inner_steps=100
)


@pytest.mark.parametrize(("pace", "expected"), [(4.0, 40), (2.0, 20), (0.01, 5), (1e300, 100), (3.14, 31)])
def test_h_is_what_a_worker_manages_in_the_time_within_the_bounds(pace: float, expected: int) -> None:
    assert inner_steps(AUTO, pace) == expected


claims = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@given(claims, st.lists(st.tuples(claims, st.integers(1, 100), st.floats(0, math.inf, exclude_min=False))))
def test_whatever_a_worker_says_of_itself_h_stays_within_the_bounds(
    claim: float | None, rounds: list[tuple[float | None, int, float]]
) -> None:
    paces = StepRates(AUTO)
    for other, steps, seconds in rounds:
        paces.observe({"w": (steps, seconds)}, {"w": other})
        assert 5 <= inner_steps(AUTO, paces.believed("w", claim)) <= 100
    assert 5 <= inner_steps(AUTO, paces.believed("new", claim)) <= 100
    assert inner_steps(SyncSpec(rounds=1, inner_steps=7), 3.0) == 7


# --- what is believed -------------------------------------------------------------------------------------------------


def played(
    paces: StepRates, worker: str, pace: float, claim: float | None, rounds: int, *, hidden_s: float = 0.0
) -> list:
    """H of a worker in so many rounds, of which it does so many steps per second and needs `hidden_s` for all else."""
    given = []
    for _ in range(rounds):
        given.append(inner_steps(AUTO, paces.believed(worker, claim)))
        paces.observe({worker: (given[-1], given[-1] / pace + hidden_s)}, {worker: claim})
    return given


@pytest.mark.covers("reliability:hostile-worker")
def test_a_worker_that_says_a_thousand_times_its_pace_gets_twice_what_it_has_shown() -> None:
    """It was once given as many as it said: 10,000 units where the others had 20, and 99.8 % of the mean."""
    assert played(StepRates(AUTO), "liar", pace=1.0, claim=1e300, rounds=6) == [40, 40, 40, 40, 40, 40]
    assert played(StepRates(AUTO), "liar", pace=2.0, claim=1e300, rounds=4) == [40, 40, 40, 40]
    assert played(StepRates(AUTO), "liar", pace=3.0, claim=1e300, rounds=4) == [40, 60, 60, 60]


def test_a_newcomer_gets_no_more_than_half_of_the_others_have() -> None:
    paces = StepRates(AUTO)
    assert inner_steps(AUTO, paces.believed("first", 9.0)) == 40, "the nominal pace, as nobody has shown one"
    paces.observe({"a": (20, 10.0), "b": (10, 10.0), "liar": (10, 0.0)}, {"a": 2.0, "b": 1.0, "liar": 1e300})
    assert inner_steps(AUTO, paces.believed("new", 1e300)) == 20
    assert inner_steps(AUTO, paces.believed("new", None)) == 20, "where it says nothing yet, the same"
    assert inner_steps(AUTO, paces.believed("new", 0.7)) == 7, "a slow one is believed"


def test_an_honest_newcomer_is_at_its_pace_within_a_few_rounds_whatever_is_hidden_in_its_first() -> None:
    paces = StepRates(AUTO)
    paces.observe({"slow": (5, 10.0)}, {"slow": 0.5})
    assert played(paces, "fast", pace=8.0, claim=8.0, rounds=3) == [5, 80, 80]
    paces.observe({"slow": (5, 10.0)}, {"slow": 0.5})
    assert played(paces, "compiles", pace=8.0, claim=8.0, rounds=6, hidden_s=3.0)[-2:] == [80, 80]


@pytest.mark.parametrize("hidden_s", [0.0, 5.0, 9.0, 100.0])
def test_an_honest_worker_keeps_what_it_manages_however_long_its_line_takes(hidden_s: float) -> None:
    assert played(StepRates(AUTO), "w", pace=4.0, claim=4.0, rounds=20, hidden_s=hidden_s) == [40] * 20


def test_one_round_with_an_outage_is_no_change_of_pace() -> None:
    paces = StepRates(AUTO)
    paces.observe({"w": (80, 10.0)}, {"w": 8.0})
    paces.observe({"w": (5, 1000.0)}, {"w": 8.0})
    assert inner_steps(AUTO, paces.believed("w", 8.0)) == 80


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('inner_steps = "auto"', "give round_s"),
        ("inner_steps = 5\nround_s = 10.0", 'give round_s with "auto", and only with it'),
        ('inner_steps = "auto"\nround_s = 10\nnominal_inner_steps = 5', "nominal_inner_steps = 5"),
        ('inner_steps = "often"', "inner_steps"),
    ],
)
def test_a_spec_that_does_not_fit_together_is_refused(lines: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse_spec(f'name = "r"\n[model]\npreset = "tiny"\n[sync]\nrounds = 1\n{lines}')


def test_the_schedules_count_nominal_steps() -> None:
    assert AUTO.schedule_steps == 40
    assert SyncSpec(rounds=1, inner_steps=7).schedule_steps == 7


def say_pace(member: Member, inner_steps_per_second: float) -> None:
    told = {"inner_steps_per_second": inner_steps_per_second}
    member.http.put(member.path("/lease"), json=told).raise_for_status()


def test_a_fast_and_a_slow_worker_get_what_they_manage(shared: InThread, run: str, clock: SettableClock) -> None:
    spec = spec_toml(
        run, min_workers=2, sync='round_s = 10\nnominal_inner_steps = 10\nmin_inner_steps = 2'
    ).replace("inner_steps = 5\n", 'inner_steps = "auto"\n', 1)  # fmt: skip
    shared.create_run(spec)
    fast, slow = enlist(shared, run, "fast"), enlist(shared, run, "slow")
    assert fast.assignment(None).action == "seed"
    fast.seed()
    for theta in slow.theta:
        theta[:] = 0.5
    speeds, members = {"fast": 2.0, "slow": 0.5}, (fast, slow)
    for round_, expected in enumerate([(10, 5), (20, 5)]):  # nobody has shown a pace in the first round
        for member in members:
            say_pace(member, speeds[member.name])
            member.assignment(round_)
        assignments = [member.assignment(round_) for member in members]
        assert tuple(each.inner_steps for each in assignments) == expected
        say_pace(slow, 9.0)
        assert slow.assignment(round_).inner_steps == 5, "what is assigned stays"
        say_pace(slow, speeds["slow"])
        clock.advance(10)
        for member in members:
            member.take_part(round_)
        for member in members:
            member.step(round_)
    assert info(shared, run, "/rounds/1")["tokens"] == 25 * 32


def test_who_comes_late_or_was_restarted_gets_what_the_rest_of_the_round_allows(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    spec = spec_toml(
        run, sync='round_s = 10\nnominal_inner_steps = 40\nmin_inner_steps = 2', members="lease_s = 100"
    ).replace("inner_steps = 5\n", 'inner_steps = "auto"\n', 1)  # fmt: skip
    shared.create_run(spec)
    first = enlist(shared, run, "first")
    assert first.assignment(None).action == "seed"
    first.seed()
    on_time = first.assignment(0)
    assert (on_time.inner_steps, on_time.units) == (40, [[0, 40]])
    clock.advance(6)
    late = recovered(enlist(shared, run, "late")).assignment(0)
    assert (late.inner_steps, late.units) == (16, [[40, 56]])
    restarted = Member(shared.client(), run, "first")
    restarted.join(shared.admin_token, previous=first.joined.member_token)
    again = recovered(restarted).assignment(0)
    assert (again.inner_steps, again.units) == (16, [[0, 40]]), "of the same units, the first ones"
    clock.advance(100)
    assert recovered(enlist(shared, run, "last")).assignment(0).inner_steps == 2


@pytest.mark.covers("security:false-pace")
def test_who_lies_about_its_pace_gets_no_more_for_it_over_http(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    spec = spec_toml(
        run, rounds=4, min_workers=2, sync="round_s = 10\nnominal_inner_steps = 20\nmin_inner_steps = 2"
    ).replace("inner_steps = 5\n", 'inner_steps = "auto"\n', 1)  # fmt: skip
    shared.create_run(spec)
    honest, liar = members = [enlist(shared, run, "honest"), enlist(shared, run, "liar")]
    assert honest.assignment(None).action == "seed"
    honest.seed()
    recovered(liar)
    for round_ in range(3):
        for member, pace in ((honest, 2.0), (liar, 1e300)):
            say_pace(member, pace)
            member.assignment(round_)
        assert [member.assignment(round_).inner_steps for member in members] == [20, 20 if round_ == 0 else 40]
        clock.advance(10)
        honest.take_part(round_)
        clock.advance(0 if round_ == 0 else 10)  # it trains all that it is given, as fast as the other
        liar.take_part(round_)
        for member in members:
            member.step(round_)


def test_after_a_restart_nobody_gets_more_than_it_has_contributed_to_the_last_round(tmp_path: Path) -> None:
    spec = spec_toml("r", rounds=9, min_workers=2, sync="round_s = 10\nnominal_inner_steps = 20\nmax_inner_steps = 90")
    lives = Lives(tmp_path / "data")
    with lives.life() as running:
        running.create_run(spec.replace("inner_steps = 5\n", 'inner_steps = "auto"\n', 1))
        members = [enlist(running, "r", name) for name in ("honest", "liar")]
        assert members[0].assignment(None).action == "seed"
        members[0].seed()
        recovered(members[1])
        for round_, expected in enumerate([(10, 20), (10, 90)]):
            for member, pace in zip(members, (1.0, 1e300), strict=True):
                say_pace(member, pace)
                member.assignment(round_)
            assert tuple(member.take_part(round_).inner_steps for member in members) == expected
            for member in members:
                member.step(round_)
    with lives.life() as running:
        live = running.live("r")
        assert [inner_steps(live.spec.sync, live.step_rates.believed(member.name, 1e300)) for member in members] == [
            10,
            90,
        ]
