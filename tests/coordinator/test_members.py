"""Leases by an explicit clock."""

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
