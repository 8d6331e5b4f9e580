"""Members: leases by an explicit clock, and who the next round opens with."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.runs.members import Members
from protocol.messages import Metrics


def test_a_lease_lasts_its_term_and_no_longer() -> None:
    members = Members(lease_s=10)
    members.join("w", b"", now=100)
    assert members.expired(now=110) == []
    assert members.remaining_s("w", now=104) == 6
    assert members.expired(now=110.001) == ["w"]
    assert members.remaining_s("w", now=120) == 0


def test_a_heartbeat_gives_a_full_new_term() -> None:
    members = Members(lease_s=10)
    members.join("w", b"", now=0)
    assert members.renew("w", now=9, metrics=Metrics())
    assert members.expired(now=19) == []
    assert members.last_seen_s("w", now=19) == 10


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
    members.get_ready("w")
    members.end_round({"w"})
    members.appoint("seeder", "w")
    members.appoint("evaluator", "w")
    assert members.metrics("w").loss == 2.5
    members.leave("w")
    assert not members.renew("w", now=2, metrics=Metrics(loss=2.5)), "a heartbeat on its way"
    assert dict(members.by_token) == {}
    members.join("w", b"second", now=3)
    assert dict(members.by_token) == {b"second": "w"}
    assert members.metrics("w") == Metrics()
    assert members.ready == members.candidates() == set()
    assert (members.seeder, members.evaluator) == (None, None)


def test_a_round_opens_with_those_of_the_last_and_those_that_got_ready_since() -> None:
    members = Members(lease_s=10)
    for worker in ("a", "b", "c"):
        members.join(worker, worker.encode(), now=0)
    members.get_ready("a")
    members.begin_round()
    assert members.candidates() == set()
    members.end_round({"a", "dead"})
    members.get_ready("b")
    assert members.candidates() == {"a", "b"}
