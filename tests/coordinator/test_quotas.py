"""The quotas of one caller, without HTTP."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from coordinator.quotas import ALL_TOKENS, BURST_S, SWEEP_AT, Quotas, RateLimiter
from coordinator.settings import Settings
from harness.coordinator import SettableClock
from protocol.errors import Problem

A, B = b"a", b"b"


def refused(rates: RateLimiter, caller: bytes, cost: float = 1.0) -> float:
    """Return the seconds until a retry."""
    with pytest.raises(Problem, match="too-many-requests") as caught:
        rates.take(caller, cost)
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


def test_so_many_at_once_and_then_as_many_as_time_allows() -> None:
    clock = SettableClock()
    rates = RateLimiter(10, clock)
    for _ in range(int(10 * BURST_S)):
        rates.take(A)
    assert refused(rates, A) == pytest.approx(0.1)
    rates.take(B)  # another's are not touched
    clock.advance(0.35)
    for _ in range(3):
        rates.take(A)
    refused(rates, A)
    clock.advance(1000)
    for _ in range(int(10 * BURST_S)):
        rates.take(A)
    refused(rates, A)


def test_who_obeys_is_served() -> None:
    clock = SettableClock()
    rates = RateLimiter(3, clock)
    for _ in range(int(3 * BURST_S)):
        rates.take(A)
    for _ in range(100):
        clock.advance(refused(rates, A) + 1e-9)
        rates.take(A)


def test_what_costs_more_than_is_left_is_served_once_and_waited_for_afterwards() -> None:
    clock = SettableClock()
    rates = RateLimiter(10, clock)
    rates.take(A, 200)
    assert refused(rates, A) == pytest.approx(20 - BURST_S + 0.1)
    clock.advance(20 - BURST_S + 0.101)
    rates.take(A)


def test_those_with_nothing_to_remember_of_are_forgotten() -> None:
    clock = SettableClock()
    rates = RateLimiter(1000, clock)
    for number in range(10 * SWEEP_AT):
        rates.take(number.to_bytes(4, "big"))
        clock.advance(0.01)
    assert len(rates) <= SWEEP_AT


def callers(tmp_path: Path) -> Quotas:
    return Quotas(Settings(data_dir=tmp_path, streams_per_token=2), SettableClock())


def test_streams_are_counted_while_they_last(tmp_path: Path) -> None:
    counted = callers(tmp_path)
    with counted.stream(A), counted.stream(A), counted.stream(B):
        with pytest.raises(Problem, match="2 streams"), counted.stream(A):
            raise AssertionError("a third one")
        with counted.stream(B):
            pass
    with counted.stream(A), counted.stream(A):
        pass


@pytest.mark.covers("security:slow-bodies")
def test_bytes_of_messages_are_counted_per_token_and_in_all(tmp_path: Path) -> None:
    counted = callers(tmp_path)
    most = Settings(data_dir=tmp_path).message_bytes_per_token
    with ExitStack() as held:
        held.enter_context(counted.message(A, most - 1))
        with pytest.raises(Problem, match="too-many-requests"):
            held.enter_context(counted.message(A, 2))
        for number in range(1, ALL_TOKENS):
            held.enter_context(counted.message(bytes([number]), most))
        held.enter_context(counted.message(B, 1))
        with pytest.raises(Problem, match="of all tokens"):
            held.enter_context(counted.message(B, 1))
    with counted.message(A, most):
        pass
