"""Each worker its own H, where the spec says so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.harness.coordinator import InThread, SettableClock
from benchmarks.harness.member import Member, spec_toml
from coordinator.runs.pacing import inner_steps
from protocol.errors import SpecError
from protocol.spec.run import parse_spec
from protocol.spec.sections import SyncSpec
from tests.coordinator.crew import enlist, info, recovered

AUTO = SyncSpec(
    rounds=1, inner_steps="auto", round_s=10, nominal_inner_steps=40, min_inner_steps=5, max_inner_steps=100
)


@pytest.mark.parametrize(
    ("speed", "expected"), [(None, 40), (0.0, 40), (-1.0, 40), (2.0, 20), (0.01, 5), (1e300, 100), (3.14, 31)]
)
def test_h_is_what_a_worker_manages_in_the_time_within_the_bounds(speed: float | None, expected: int) -> None:
    assert inner_steps(AUTO, speed) == expected


@given(st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)))
def test_whatever_a_worker_says_of_itself_h_stays_within_the_bounds(speed: float | None) -> None:
    assert 5 <= inner_steps(AUTO, speed) <= 100
    assert inner_steps(SyncSpec(rounds=1, inner_steps=7), speed) == 7


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('inner_steps = "auto"', "give round_s"),
        ("inner_steps = 5\nround_s = 10.0", 'give round_s with "auto", and only with it'),
        ('inner_steps = "auto"\nround_s = 10\nnominal_inner_steps = 5', "lies outside"),
        ('inner_steps = "often"', "inner_steps"),
    ],
)
def test_a_spec_that_does_not_fit_together_is_refused(lines: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        parse_spec(f'name = "r"\n[model]\npreset = "tiny"\n[sync]\nrounds = 1\n{lines}')


def test_the_schedules_count_nominal_steps() -> None:
    assert AUTO.schedule_steps == 40
    assert SyncSpec(rounds=1, inner_steps=7).schedule_steps == 7


def test_a_fast_and_a_slow_worker_get_what_they_manage(shared: InThread, run: str) -> None:
    spec = spec_toml(
        run, min_workers=2, sync='round_s = 10\nnominal_inner_steps = 10\nmin_inner_steps = 2'
    ).replace("inner_steps = 5\n", 'inner_steps = "auto"\n', 1)  # fmt: skip
    shared.create_run(spec)
    fast, slow = enlist(shared, run, "fast"), enlist(shared, run, "slow")
    assert fast.assignment(None).action == "seed"
    fast.seed()
    for theta in slow.theta:
        theta[:] = 0.5
    for member, speed in ((fast, 2.0), (slow, 0.5)):
        member.http.put(member.path("/lease"), json={"inner_steps_per_second": speed}).raise_for_status()
        member.assignment(0)
    assignments = [member.assignment(0) for member in (fast, slow)]
    assert [each.inner_steps for each in assignments] == [20, 5]
    assert [each.units for each in assignments] == [[[0, 20]], [[20, 25]]]
    slow.http.put(slow.path("/lease"), json={"inner_steps_per_second": 9.0}).raise_for_status()
    assert slow.assignment(0).inner_steps == 5, "what is assigned stays"
    for member in (fast, slow):
        member.take_part(0)
    fast.step(0)
    assert info(shared, run, "/rounds/0")["tokens"] == 25 * 32


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
