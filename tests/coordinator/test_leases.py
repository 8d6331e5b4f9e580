"""Leases by an explicit clock."""

from hypothesis import given
from hypothesis import strategies as st

from coordinator.runs.leases import Leases


def test_a_lease_lasts_its_term_and_no_longer() -> None:
    leases = Leases(term_s=10)
    leases.renew("w", now=100)
    assert leases.expired(now=110) == []
    assert leases.remaining_s("w", now=104) == 6
    assert leases.expired(now=110.001) == ["w"]
    assert leases.remaining_s("w", now=120) == 0


def test_a_heartbeat_gives_a_full_new_term() -> None:
    leases = Leases(term_s=10)
    leases.renew("w", now=0)
    leases.renew("w", now=9)
    assert leases.expired(now=19) == []
    assert leases.last_seen_s("w", now=19) == 10


def test_an_expired_lease_stays_live_until_it_is_ended_so_that_its_end_is_handled_once() -> None:
    leases = Leases(term_s=10)
    leases.renew("w", now=0)
    assert leases.expired(now=11) == ["w"]
    assert "w" in leases
    leases.end("w")
    assert leases.expired(now=11) == []
    assert "w" not in leases
    assert leases.remaining_s("w", now=11) is None
    assert leases.last_seen_s("w", now=11) is None
    leases.end("w")  # again: nothing happens


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 100)), st.floats(0, 300))
def test_expired_are_exactly_the_silent_ones_in_worker_id_order(seen_at: dict[str, float], now: float) -> None:
    leases = Leases(term_s=50)
    for worker, at in seen_at.items():
        leases.renew(worker, at)
    assert leases.expired(now) == sorted(worker for worker, at in seen_at.items() if now - at > 50)
    assert leases.live() == set(seen_at)
    assert len(leases) == len(seen_at)
