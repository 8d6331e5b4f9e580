"""Members: leases by an explicit clock, and who the next round opens with."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.run.members import MISSED, Members
from protocol.messages import Metrics


@pytest.mark.covers("security:clock-set")
def test_a_lease_lasts_its_term_and_no_longer() -> None:
    members = Members(lease_s=10)
    members.join("w", b"", now=100)
    assert members.expired(now=110) == []
    assert members.remaining_s("w", now=104) == 6
    assert members.expired(now=110.001) == ["w"]
    assert members.remaining_s("w", now=120) == 0
    assert members.renew("w", now=109, metrics=Metrics())
    assert members.expired(now=119) == []
    assert members.last_seen_s("w", now=119) == 10


def test_an_expired_lease_stays_live_until_it_is_ended_so_that_its_end_is_handled_once() -> None:
    members = Members(lease_s=10)
    members.join("w", b"", now=0)
    assert members.expired(now=11) == ["w"]
    assert "w" in members
    members.leave("w")
    assert members.expired(now=11) == []
    assert "w" not in members
    assert members.remaining_s("w", now=11) is None
    assert members.last_seen_s("w", now=11) is None
    members.leave("w")  # again: nothing happens


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 100)), st.floats(0, 300))
def test_expired_are_exactly_the_silent_ones_in_worker_id_order(seen_at: dict[str, float], now: float) -> None:
    members = Members(lease_s=50)
    for worker, at in seen_at.items():
        members.join(worker, worker.encode(), at)
    assert members.expired(now) == sorted(worker for worker, at in seen_at.items() if now - at > 50)
    assert members.live() == set(seen_at)
    assert len(members) == len(seen_at)


def test_whatever_is_known_of_a_member_ends_with_its_lease() -> None:
    members = Members(lease_s=10)
    members.join("w", b"first", now=0)
    assert members.renew("w", now=1, metrics=Metrics(loss=2.5))
    members.mark_ready("w")
    members.end_round({"w"})
    members.appoint_seeder("w", now=0)
    members.evaluators.add("w")
    assert members.metrics("w").loss == 2.5
    members.leave("w")
    assert not members.renew("w", now=2, metrics=Metrics(loss=2.5)), "a heartbeat on its way"
    assert dict(members.by_token_hash) == {}
    members.join("w", b"second", now=3)
    assert dict(members.by_token_hash) == {b"second": "w"}
    assert members.metrics("w") == Metrics()
    assert members.ready == members.candidates() == set()
    assert (members.seeder, members.evaluators) == (None, set())


def test_a_round_opens_with_those_of_the_last_and_those_that_got_ready_since() -> None:
    members = Members(lease_s=10)
    for worker in ("a", "b", "c"):
        members.join(worker, worker.encode(), now=0)
    members.mark_ready("a")
    members.begin_round()
    assert members.candidates() == set()
    members.end_round({"a", "dead"})
    members.mark_ready("b")
    assert members.candidates() == {"a", "b"}


# --- who is waited for ------------------------------------------------------------------------------------------------


def joined(*workers: str, proven: bool = False) -> Members:
    members = Members(lease_s=10)
    for worker in workers:
        members.join(worker, worker.encode(), now=0, proven=proven)
    return members


def test_in_the_first_round_all_are_waited_for_alike() -> None:
    assert joined("a", "b").waited_for({"a", "b", "gone"}) == ({"a", "b"}, set())


@pytest.mark.covers("security:many-names-one-token")
def test_a_newcomer_is_waited_for_once_and_makes_no_quorum() -> None:
    members = joined("a", "b", proven=True)
    members.join("new", b"new", now=0)
    everybody = {"a", "b", "new"}
    assert members.waited_for(everybody) == ({"a", "b"}, {"new"})
    members.end_round(everybody, {"a", "b"})
    assert members.waited_for(everybody) == ({"a", "b"}, set())
    members.end_round(everybody, everybody)
    assert members.waited_for(everybody) == (everybody, set())


@pytest.mark.covers("security:silent-newcomers")
def test_who_misses_round_after_round_is_not_waited_for_until_it_contributes() -> None:
    members = joined("a", "b", "slow", proven=True)
    everybody = {"a", "b", "slow"}
    for _ in range(MISSED):
        assert members.waited_for(everybody)[0] == everybody
        members.end_round(everybody, {"a", "b"})
    assert members.waited_for(everybody) == ({"a", "b"}, set())
    members.end_round({"a", "b"}, {"a", "b", "slow"})  # late work, in a round that it has no part in
    assert members.waited_for(everybody)[0] == everybody


def test_where_all_have_missed_too_many_rounds_all_are_waited_for() -> None:
    members = joined("a", "b", proven=True)
    for _ in range(MISSED):
        members.end_round({"a", "b"}, set())
    assert members.waited_for({"a", "b"}) == ({"a", "b"}, set())


def test_whose_a_worker_is_is_known_after_it_has_left() -> None:
    members = Members(lease_s=10)
    members.join("a", b"a", now=0, token="x")
    members.join("b", b"b", now=0)
    members.leave("a")
    assert dict(members.owners) == {"a": "x"}
    members.join("a", b"c", now=1)
    assert dict(members.owners) == {}, "released, and taken by one of before tokens were kept"


def test_a_worker_that_joins_again_is_what_it_was() -> None:
    members = joined("a", "b")
    members.end_round({"a", "b"}, {"a"})
    for worker in ("a", "b"):
        members.leave(worker)
        members.join(worker, worker.encode(), now=1)
    assert members.waited_for({"a", "b"}) == ({"a"}, set())


def training(step: int, rate: float | None = 2.0, phase: str = "train") -> Metrics:
    return Metrics(round=3, inner_step=step, inner_steps_per_second=rate, phase=phase)


def test_who_takes_no_inner_step_has_stalled_however_its_heartbeats_go_on() -> None:
    members = Members(lease_s=60)
    members.join("w", b"w", now=0)
    for now, step in ((20, 30), (40, 70), (60, 71), (80, 71), (100, 71), (120, 71)):
        assert members.stalled(now) == {}
        members.renew("w", now, training(step))
    assert members.stalled(now=120) == {}, "for a lease, since the step was first reported"
    assert members.stalled(now=121) == {"w": 61}
    members.renew("w", 130, training(72))
    assert members.stalled(now=190) == {}


@pytest.mark.parametrize(
    ("metrics", "after_s"),
    [
        (training(1, rate=0.05), 200.0),  # its steps take 20 s
        (training(1, rate=None), None),  # nobody knows how long its steps take
        (training(1, phase="sync"), None),  # it waits for a delta
        (training(1, phase="evaluate"), None),
    ],
)
def test_a_worker_has_stalled_only_in_training_and_after_ten_of_its_steps(
    metrics: Metrics, after_s: float | None
) -> None:
    members = Members(lease_s=60)
    members.join("w", b"w", now=0, metrics=metrics)
    for now in range(0, 1000, 20):
        members.renew("w", now, metrics)
        assert bool(members.stalled(now)) == (after_s is not None and now > after_s)
