"""When a round closes: `decide` and its parts, by table and by property. No I/O, no clock."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coordinator.run.decide import (
    TRANSITIONS,
    Close,
    OverdueHeartbeat,
    Wait,
    advance,
    decide,
    grace_s,
    has_quorum,
    without_refused,
)
from protocol.messages import FragmentState
from protocol.spec.sections import MembersSpec

POLICY = MembersSpec(min_workers=2, grace_factor=0.5, grace_min_s=5, grace_max_s=60, round_max_s=None)
ALL = {"w0", "w1", "w2", "w3", "w4"}

workers = st.sets(st.sampled_from([f"w{i}" for i in range(8)]))
seconds = st.floats(0, 1e6)
policies = st.builds(
    lambda minimum, factor, shortest, more, cap: MembersSpec(
        min_workers=minimum,
        grace_factor=factor,
        grace_min_s=shortest,
        grace_max_s=shortest + more,
        round_max_s=cap,
    ),
    st.integers(1, 8),
    st.floats(0, 100),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
    st.none() | st.floats(1, 1e5),
)


@st.composite
def situations(draw: st.DrawFn) -> dict:
    """Arguments of `decide` as they can come: `quorum_at` is set exactly once a quorum had been there."""
    expected, contributed, policy = draw(workers), draw(workers), draw(policies)
    opened_at = draw(seconds)
    now = opened_at + draw(seconds)
    quorum_at = None
    if has_quorum(expected, contributed, policy):
        quorum_at = draw(st.floats(opened_at, now))
    return {
        "expected": expected,
        "contributed": contributed,
        "policy": policy,
        "opened_at": opened_at,
        "quorum_at": quorum_at,
        "now": now,
        "grace_from": opened_at + draw(st.just(0.0) | seconds),
    }


@pytest.mark.parametrize(
    ("waited_for", "contributed", "refused", "least"),
    [
        ("abcm", "abc", "m", 3),  # everybody is needed, and m may never send what is accepted
        ("abcm", "ab", "m", 3),
        ("abcm", "abc", "", 4),  # m may still send something
        ("abcm", "abcm", "m", 4),  # it has, after all
        ("abcdm", "abc", "m", 4),  # d is enough
        ("abc", "abc", "", 4),  # too few workers: the run waits for more
        ("abm", "ab", "m", 3),
        ("mnop", "", "mnop", 1),
    ],
)
def test_who_is_refused_is_not_needed(waited_for: str, contributed: str, refused: str, least: int) -> None:
    policy = POLICY.model_copy(update={"min_workers": 4})
    found = without_refused(policy, set(waited_for), set(contributed), set(refused))
    assert found == policy.model_copy(update={"min_workers": least})


@pytest.mark.parametrize(
    ("expected", "contributed", "quorum_at", "now", "decision"),
    [
        pytest.param(
            ALL, set(), None, 0, Wait(None, "waiting for 5 of 5 workers (w0, w1, w2 and 2 more); no deadline before a quorum has contributed"), id="nobody yet"
        ),
        pytest.param(
            ALL, {"w0", "w1"}, None, 1e9, Wait(None, "waiting for 3 of 5 workers (w2, w3, w4); no deadline before a quorum has contributed"), id="no quorum, however long"
        ),
        pytest.param(
            ALL, {"w0", "w1", "w4"}, 20, 21, Wait(30, "waiting for 2 of 5 workers (w2, w3); closes in 9 s"), id="quorum, grace runs"
        ),
        pytest.param(
            ALL, {"w4", "w0", "w1"}, 20, 30, Close(("w0", "w1", "w4"), "closed without w2, w3 after 10 s of grace; 3 of 5 workers have contributed"), id="grace is over"
        ),
        pytest.param(ALL, ALL, 20, 20, Close(("w0", "w1", "w2", "w3", "w4"), "all 5 workers have contributed"), id="all"),
        pytest.param(
            {"w0"}, {"w0"}, None, 0, Wait(None, "1 of at least 2 workers have contributed; waiting for more workers to join"), id="all, but too few"
        ),
        pytest.param(set(), {"w0", "w1"}, 1, 1, Close(("w0", "w1"), "all 2 workers have contributed"), id="contributed and then died"),
        pytest.param(
            set(), set(), None, 0, Wait(None, "0 of at least 2 workers have contributed; waiting for more workers to join"), id="everybody died"
        ),
    ],
)  # fmt: skip
def test_the_table_of_decisions(
    expected: set, contributed: set, quorum_at: float | None, now: float, decision: Wait | Close
) -> None:
    assert decide(expected, contributed, POLICY, opened_at=0, quorum_at=quorum_at, now=now) == decision


def test_the_grace_does_not_begin_before_the_fastest_worker_can_be_done() -> None:
    """A box of a twentieth of the speed sends what it began in an earlier round, soon after this one has opened."""

    def decided(now: float, contributed: set, quorum_at: float | None) -> Wait | Close:
        policy = POLICY.model_copy(update={"min_workers": 1})
        return decide({"w0", "w1"}, contributed, policy, opened_at=0, quorum_at=quorum_at, now=now, grace_from=40)

    assert decided(30, {"w1"}, 2) == Wait(60, "waiting for 1 of 2 workers (w0); closes in 30 s")
    assert decided(60, {"w1"}, 2) == Close(
        ("w1",), "closed without w0 after 20 s of grace; 1 of 2 workers have contributed"
    )
    assert decided(60, {"w0"}, 50) == Wait(75, "waiting for 1 of 2 workers (w1); closes in 15 s")
    assert isinstance(decided(41, {"w0", "w1"}, 2), Close)


def test_a_worker_that_is_silent_is_named_before_all_else_and_still_waited_for() -> None:
    """It was waited for like any other until its lease ended, without a word of it."""
    silent = {"w1": OverdueHeartbeat(46.0, 14.0), "w0": OverdueHeartbeat(50.0, 10.0)}

    def decided(expected: set, contributed: set) -> Wait | Close:
        return decide(expected, contributed, POLICY, opened_at=0, quorum_at=None, now=60, silent=silent)

    of_silent, of_others = decided({"w0", "w1", "w2"}, {"w0"}), decided({"w2", "w3"}, set())
    assert of_silent.reason.startswith("w1 is silent: last heard 46 s ago, dropped in 14 s; waiting for 2 of 3 workers")
    assert isinstance(of_silent, Wait)
    assert isinstance(of_others, Wait)
    assert (of_silent.silent, of_others.silent) == (True, False)


def test_a_worker_that_has_stalled_is_not_waited_for_once_there_is_a_quorum() -> None:
    """Its heartbeats go on, so its lease would hold every round for the grace."""

    def decided(contributed: set, quorum_at: float | None, stalled: dict[str, float]) -> Wait | Close:
        return decide(
            {"w0", "w1", "w2"}, contributed, POLICY, opened_at=0, quorum_at=quorum_at, now=60, stalled=stalled
        )

    hung = {"w2": 61.0}
    for contributed, quorum_at, stalled, outcome, said in (
        ({"w0"}, None, hung, Wait, "w2 has taken no inner step for 61 s; waiting for 2 of 3 workers (w1, w2); "),
        ({"w0", "w1"}, 60, hung, Close, "closed without waiting further, as w2 has taken no inner step for 61 s; "),
        ({"w0", "w1"}, 60, {}, Wait, "waiting for 1 of 3 workers (w2); "),
        ({"w0", "w1", "w2"}, 60, hung, Close, "all 3 workers have contributed"),  # it has made it after all
        # A minority does not go on alone.
        ({"w0"}, None, {"w1": 70.0, "w2": 61.0}, Wait, "w1, w2 have taken no inner step for 70 s; waiting for"),
    ):
        decision = decided(contributed, quorum_at, stalled)
        assert isinstance(decision, outcome)
        assert decision.reason.startswith(said)


@pytest.mark.slow
@given(situations())
def test_a_round_never_closes_below_min_workers_and_sums_in_worker_id_order(situation: dict) -> None:
    decision = decide(**situation)
    if isinstance(decision, Close):
        assert list(decision.contributors) == sorted(situation["contributed"])
        assert len(decision.contributors) >= situation["policy"].min_workers


@pytest.mark.slow
@given(situations())
def test_a_round_closes_at_once_when_nobody_is_waited_for(situation: dict) -> None:
    assume(situation["expected"] <= situation["contributed"])
    assume(len(situation["contributed"]) >= situation["policy"].min_workers)
    assert isinstance(decide(**situation), Close)


@given(situations(), seconds)
def test_the_deadline_stands_still_while_time_passes_and_a_closed_round_stays_closed(
    situation: dict, later_s: float
) -> None:
    now, later = decide(**situation), decide(**{**situation, "now": situation["now"] + later_s})
    if isinstance(now, Close):
        assert isinstance(later, Close)
        assert later.contributors == now.contributors
    elif isinstance(later, Wait):
        assert now.until == later.until
    elif now.until is not None:
        assert situation["now"] < now.until <= situation["now"] + later_s


@given(situations(), workers)
def test_a_further_contribution_never_puts_the_deadline_off(situation: dict, more: set) -> None:
    before = decide(**situation)
    contributed = situation["contributed"] | more
    quorum_at = situation["quorum_at"]
    if quorum_at is None and has_quorum(situation["expected"], contributed, situation["policy"]):
        quorum_at = situation["now"]
    after = decide(**{**situation, "contributed": contributed, "quorum_at": quorum_at})
    if isinstance(before, Close):
        assert isinstance(after, Close)
    elif before.until is not None and isinstance(after, Wait):
        assert after.until == before.until


@given(workers, workers, policies)
def test_a_quorum_is_more_than_half_and_at_least_min_workers(
    expected: set, contributed: set, policy: MembersSpec
) -> None:
    quorum = has_quorum(expected, contributed, policy)
    assert quorum == (len(contributed) > len(expected | contributed) / 2 and len(contributed) >= policy.min_workers)
    if quorum:
        assert not has_quorum(expected, contributed, policy.model_copy(update={"min_workers": len(contributed) + 1}))


# --- voices -----------------------------------------------------------------------------------------------------------

ANY = MembersSpec(min_workers=1)
ONE = dict.fromkeys("abcdmnop", "x")
OF_M = dict.fromkeys("mnop", "m")


@pytest.mark.parametrize(
    ("expected", "contributed", "owners", "quorum"),
    [
        pytest.param("ab", "a", {}, True, id="one of two boxes"),
        pytest.param("ab", "a", ONE, True, id="one of two boxes of one token"),
        pytest.param("ab", "", {}, False, id="none of two boxes"),
        pytest.param("abc", "a", {}, False, id="one of three"),
        pytest.param("abcd", "ab", {}, False, id="half of four"),
        pytest.param("abcd", "ab", ONE, False, id="half of four of one token"),
        pytest.param("mnop", "mno", ONE, True, id="more than half of four of one token"),
        pytest.param("abcd", "ab", {"a": "x", "b": "x", "c": "y", "d": "y"}, True, id="one of two places"),
        pytest.param("abcd", "d", {"a": "x", "b": "x", "c": "x", "d": "y"}, False, id="half of the votes, a quarter of the workers"),
        pytest.param("mnopbc", "mnop", OF_M, False, id="four names of one token are one voice of three"),
        pytest.param("mnopbc", "mnopb", OF_M, True, id="with b they are two"),
        pytest.param("mnopbc", "bc", OF_M, True, id="and the other two need none of them"),
        pytest.param("mnopbc", "mnob", OF_M, True, id="a part of a voice counts as that"),
        pytest.param("mnopbc", "mnb", OF_M, False, id="half of one and another are half of three"),
        pytest.param("bc", "mnop", OF_M, False, id="nor do they outvote anybody after they have left"),
        pytest.param("mnopb", "mnop", OF_M, True, id="of two tokens, the one with more workers decides"),
        pytest.param("mnopb", "mb", OF_M, True, id="of two tokens, both"),
    ],
)  # fmt: skip
def test_a_token_has_one_voice_however_many_names(
    expected: str, contributed: str, owners: dict[str, str], quorum: bool
) -> None:
    """Of two votes one is enough, and of more a majority."""
    assert has_quorum(set(expected), set(contributed), ANY, owners) is quorum


@given(workers, workers, policies)
def test_a_run_of_one_token_has_the_quorum_of_its_workers(expected: set, contributed: set, policy: MembersSpec) -> None:
    owners = dict.fromkeys(expected | contributed, "m")
    assert has_quorum(expected, contributed, policy, owners) == has_quorum(expected, contributed, policy)


@pytest.mark.slow
@given(workers, workers, st.dictionaries(st.sampled_from([f"w{i}" for i in range(8)]), st.sampled_from("xyz")), workers)
def test_a_further_contribution_never_takes_a_quorum_away(
    expected: set, contributed: set, owners: dict, more: set
) -> None:
    if has_quorum(expected, contributed, ANY, owners):
        assert has_quorum(expected, contributed | (more & expected), ANY, owners)


@given(workers, st.dictionaries(st.sampled_from([f"w{i}" for i in range(3, 8)]), st.sampled_from("xyz")))
def test_where_there_are_three_tokens_none_is_a_quorum_alone(more: set, owners: dict) -> None:
    owners = {"w0": "x", "w1": "y", "w2": "z"} | owners
    expected = {"w0", "w1", "w2"} | more
    assert not has_quorum(expected, {worker for worker in expected if owners.get(worker) == "x"}, ANY, owners)


@given(policies, seconds, seconds)
def test_the_grace_is_in_proportion_to_the_time_to_the_quorum_within_its_bounds(
    policy: MembersSpec, opened_at: float, took_s: float
) -> None:
    grace = grace_s(policy, opened_at, opened_at + took_s)
    assert policy.grace_min_s <= grace <= policy.grace_max_s
    assert grace <= grace_s(policy, opened_at, opened_at + 2 * took_s)


def test_a_fragment_goes_from_collecting_to_published_and_stays_there() -> None:
    assert set(TRANSITIONS) == set(FragmentState)
    assert advance(FragmentState.COLLECTING, "closed") is FragmentState.AGGREGATING
    assert advance(FragmentState.AGGREGATING, "contribution lost") is FragmentState.COLLECTING
    assert advance(FragmentState.AGGREGATING, "published") is FragmentState.PUBLISHED
    for what in ("closed", "contribution lost", "published"):
        with pytest.raises(ValueError, match="cannot happen to a fragment that is published"):
            advance(FragmentState.PUBLISHED, what)
