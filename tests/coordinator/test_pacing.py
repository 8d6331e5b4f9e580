"""Each worker its own H, where the spec says so: as many inner steps as it manages while the fastest worker does H."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.rounds.opening import inner_steps_of
from coordinator.run.open_round import OpenRound
from coordinator.run.step_rates import MAX_LEAD, StepRates, fastest, first_steps, inner_steps
from harness.coordinator import InThread, SettableClock
from harness.member import Member
from protocol.messages import Assignment
from tests.coordinator.crew import crew, enlist, info, play_round, recovered
from tests.coordinator.test_restart import Lives
from tests.support.waiting import wait_until

H = 40


@pytest.mark.parametrize(("rate", "expected"), [(4.0, 40), (2.0, 20), (0.01, 1), (1e300, 40), (3.14, 31)])
def test_h_is_what_a_worker_manages_while_the_fastest_does_it_all(rate: float, expected: int) -> None:
    assert inner_steps(H, rate, fastest=4.0) == expected


@pytest.mark.parametrize(("elapsed_s", "expected"), [(0.0, 20), (5.0, 10), (9.9, 1), (1000.0, 1)])
def test_who_comes_late_does_what_the_rest_of_the_round_allows(elapsed_s: float, expected: int) -> None:
    assert inner_steps(H, 2.0, fastest=4.0, elapsed_s=elapsed_s) == expected


@pytest.mark.parametrize(("h", "expected"), [(1, 1), (9, 1), (40, 4), (500, 50)])
def test_a_worker_of_unknown_rate_does_a_short_round(h: int, expected: int) -> None:
    assert first_steps(h) == expected


# --- what is believed -------------------------------------------------------------------------------------------------

claims = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.slow
@example(5e-324, [(None, 1, 1.0)], 5e-324)  # it would be the fastest, in a round that never ends
@given(claims, st.lists(st.tuples(claims, st.integers(1, 100), st.floats(0, 1e9))), st.floats(0, 1e3, exclude_min=True))
def test_whatever_a_worker_says_of_itself_h_stays_within_the_bounds(
    claim: float | None, rounds: list[tuple[float | None, int, float]], other: float
) -> None:
    rates = StepRates()
    assert rates.believed("w", claim) is None
    for _, steps, seconds in rounds:
        rates.observe({"w": (steps, seconds)})
        rate = rates.believed("w", claim)
        assert rate is not None
        credible = fastest({"w": rate, "other": other}, {})
        assert 1 <= inner_steps(H, rate, credible) <= H
        assert max(rate, other) == credible


def played(rates: StepRates, pace: float, claim: float | None, rounds: int, *, hidden_s: float = 0.0) -> list[int]:
    """H of a worker in so many rounds beside one of 4 steps per second. It does `pace` steps per second, and needs
    `hidden_s` for all else."""
    given = []
    for _ in range(rounds):
        rate = rates.believed("w", claim)
        given.append(first_steps(H) if rate is None else inner_steps(H, rate, 4.0))
        rates.observe({"w": (given[-1], given[-1] / pace + hidden_s)})
    return given


@pytest.mark.covers("reliability:hostile-worker")
def test_a_worker_that_says_a_thousand_times_its_pace_gets_twice_what_it_has_shown() -> None:
    """It was once given as many as it said: 10,000 units where the others had 20, and 99.8 % of the mean."""
    assert played(StepRates(), pace=1.0, claim=1e300, rounds=4) == [4, 40, 20, 20]
    assert played(StepRates(), pace=3.0, claim=1e300, rounds=4) == [4, 40, 40, 40]


@pytest.mark.parametrize("hidden_s", [0.0, 1.0, 2.0])
def test_an_honest_worker_is_at_its_pace_after_its_first_round_whatever_is_hidden_in_it(hidden_s: float) -> None:
    assert played(StepRates(), pace=2.0, claim=2.0, rounds=4, hidden_s=hidden_s) == [4, 20, 20, 20]


def test_a_slow_line_does_not_hide_the_pace_in_the_first_round() -> None:
    """It hides more of it than in later ones, which have ten times the steps. The second round was longer for it."""
    rates = StepRates()
    rates.observe({"w": (4, 2.0 + 14.0)})
    assert rates.believed("w", 2.0) == 2.0
    rates.observe({"w": (20, 10.0 + 10.0)})
    assert rates.believed("w", 2.0) == 2.0
    assert rates.believed("w", 8.0) == 2.0


def test_one_round_with_an_outage_is_no_change_of_pace() -> None:
    rates = StepRates()
    rates.observe({"w": (80, 10.0)})
    rates.observe({"w": (5, 1000.0)})
    assert rates.believed("w", 8.0) == 8.0


@pytest.mark.covers("security:false-pace")
def test_who_uploads_at_once_without_training_does_not_leave_a_single_step_to_the_others() -> None:
    """Where there are two others that show what is usual. A round is as long as the fastest needs."""
    rates, owners = {"a": 1.0, "b": 0.5, "liar": 1e6}, {"a": "a", "b": "b", "liar": "c"}
    assert fastest(rates, owners) == MAX_LEAD
    assert inner_steps(H, 1.0, fastest(rates, owners)) == 5
    assert fastest({"a": 1.0, "b": 0.05, "c": 0.05}, {}) == 0.4, "so a very fast one of three waits, or trains on"
    assert fastest({"a": 1.0, "b": 0.05}, {}) == 1.0, "of two nobody can tell"
    many = {"a": 1.0, "b": 0.5, "liar1": 1e6, "liar2": 1e6}
    assert fastest(many, {"liar1": "c", "liar2": "c"}) == MAX_LEAD, "names of one token are one"


# --- of a run ---------------------------------------------------------------------------------------------------------


AUTO = 'wait = "never"'


def say_pace(member: Member, inner_steps_per_second: float) -> None:
    told = {"inner_steps_per_second": inner_steps_per_second}
    member.http.put(member.path("/lease"), json=told).raise_for_status()


PACES = {"fast": 2.0, "slow": 0.5}


def assigned(members: list[Member], round_: int) -> list[Assignment]:
    """What each is assigned, once all have said their pace."""
    for member in members:
        say_pace(member, PACES[member.name])
        member.assignment(round_)
    return [member.assignment(round_) for member in members]


def hand_in(members: list[Member], assignments: list[Assignment], clock: SettableClock) -> None:
    """All contribute and step, one after the other."""
    for member, each in zip(members, assignments, strict=True):
        clock.advance(each.inner_steps / PACES[member.name] / 2)
        member.contribute_all(each)
    for member in members:
        member.step(each.round)


@pytest.mark.slow
def test_a_fast_and_a_slow_worker_get_what_they_manage(shared: InThread, run: str, clock: SettableClock) -> None:
    _, slow = members = crew(shared, run, ["fast", "slow"], rounds=4, inner_steps=20, min_workers=2, sync=AUTO)
    steps = 0
    for round_, expected in enumerate([(2, 2), (20, 5), (20, 5)]):  # nobody has shown a pace in the first round
        assignments = assigned(members, round_)
        assert tuple(each.inner_steps for each in assignments) == expected
        assert [(each.step, each.schedule_steps) for each in assignments] == [(steps, expected[0])] * 2
        say_pace(slow, 9.0)
        assert slow.assignment(round_).inner_steps == expected[1], "what is assigned stays"
        say_pace(slow, PACES["slow"])
        hand_in(members, assignments, clock)
        steps += expected[0]
    assert info(shared, run, "/rounds/1")["tokens"] == 25 * 32
    assert info(shared, run)["rounds"] == 5, "the short one is added"


def test_the_grace_may_begin_once_the_fastest_has_had_time_for_h() -> None:
    opening = OpenRound(3, 0, 40, 100.0, {"fast", "slow"}, [], fastest=4.0)
    assert opening.grace_from == 110
    assert replace(opening, fastest=None).grace_from == 100


@pytest.mark.slow
def test_what_a_slow_worker_began_earlier_does_not_close_the_round_on_the_fastest(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    """With a second box of a twentieth of the speed, most rounds closed without the work of the fast one."""
    grace = "grace_factor = 0\ngrace_min_s = 2\ngrace_max_s = 2\nlease_s = 1000"
    fast, slow = members = crew(shared, run, ["fast", "slow"], rounds=4, inner_steps=20, sync=AUTO, members=grace)
    for round_ in range(2):
        for member, pace in zip(members, (2.0, 0.1), strict=True):
            say_pace(member, pace)
            member.assignment(round_)
        slow_one, fast_one = slow.assignment(round_), fast.assignment(round_)
        slow.contribute_all(slow_one)
        clock.advance(1 if round_ == 0 else 9)
        if round_ == 1:
            assert info(shared, run, "/rounds/1")["closes_in_s"] == 3, "2 s after the 10 s that the fast one needs"
        fast.contribute_all(fast_one)
        for member in members:
            member.step(round_)
    assert info(shared, run, "/rounds/1")["fragments"][0]["contributors"] == ["fast", "slow"]


def test_who_joins_or_was_restarted_within_a_round_gets_less(shared: InThread, run: str, clock: SettableClock) -> None:
    (first,) = crew(shared, run, ["first"], rounds=4, inner_steps=40, sync=AUTO, members="lease_s = 100")
    say_pace(first, 4.0)
    assert first.assignment(0).inner_steps == 4
    clock.advance(1)
    first.take_part(0)
    first.step(0)
    on_time = first.assignment(1)
    assert (on_time.inner_steps, on_time.units) == (40, [[16, 176]])
    clock.advance(6)
    late = recovered(enlist(shared, run, "late"))
    assert late.http.put(late.path("/assignment"), json={"state_round": 1, "carried": []}).json()["inner_steps"] == 4
    restarted = Member(shared.client(), run, "first")
    restarted.join(shared.admin_token, previous=first.joined.member_token)
    say_pace(restarted, 4.0)
    again = restarted.http.put(restarted.path("/assignment"), json={"state_round": 1, "carried": []}).json()
    assert (again["inner_steps"], again["units"]) == (16, [[16, 176]]), "of the same units, the first ones"


def after_round_0(shared: InThread, run: str, clock: SettableClock, *names: str) -> list[Member]:
    """Return two workers that have taken part in round 0 of a run with H = 40, each with 4 inner steps in a second."""
    spec = {"rounds": 4, "inner_steps": 40, "min_workers": 2, "sync": AUTO, "members": "lease_s = 100"}
    members = crew(shared, run, list(names), **spec)
    for member in members:
        say_pace(member, 4.0)
        member.assignment(0)
    clock.advance(1)
    play_round(members, 0)
    return members


def test_a_round_in_which_all_begin_late_has_the_whole_h(shared: InThread, run: str, clock: SettableClock) -> None:
    """As when a round was done again, and all workers first fetch the state that the next one starts from."""
    members = after_round_0(shared, run, clock, "a", "b")
    for member in members:
        clock.advance(30)
        assert member.assignment(1).inner_steps == (40 if member is members[0] else 1)


def test_one_in_quarantine_does_not_begin_the_round_for_the_others(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    hostile, honest = after_round_0(shared, run, clock, "hostile", "honest")
    live = shared.live(run)
    wait_until(lambda: live.open is not None and live.open.number == 1)
    live.members.quarantine("hostile", until=9)
    assert hostile.assignment(1).action == "train"
    clock.advance(30)
    assert honest.assignment(1).inner_steps == 40


@pytest.mark.slow
def test_after_a_restart_each_gets_what_it_has_contributed_to_the_last_round(tmp_path: Path) -> None:
    lives, clock = Lives(tmp_path / "data"), SettableClock()
    with lives.life(clock=clock, now=clock) as running:
        members = crew(running, "r", ["fast", "slow"], rounds=9, inner_steps=20, min_workers=2, sync=AUTO)
        for round_, expected in enumerate([(2, 2), (20, 5)]):
            assignments = assigned(members, round_)
            assert tuple(each.inner_steps for each in assignments) == expected
            hand_in(members, assignments, clock)
    with lives.life(clock=clock, now=clock) as running:
        live = running.live("r")
        assert live.open is not None
        assert [inner_steps_of(live, live.open, member.name) for member in members] == [20, 5]
