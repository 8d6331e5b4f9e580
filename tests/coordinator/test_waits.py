"""What a worker waited for in a round: from its own report, and from the coordinator's times."""

import pytest

from coordinator.reporting.waits import RoundTimes, held_s, waiting, waits_of
from protocol.messages import Account, Stage, Waits
from protocol.spec.sections import SyncSpec


def account(**seconds: float) -> Account:
    return Account(seconds={Stage(name.replace("_", "-")): value for name, value in seconds.items()})


def times(sent_at: float = 110.0, collected_at: float = 114.0, published_at: float = 117.0) -> RoundTimes:
    return RoundTimes(2, collected_at, published_at, {"w": sent_at})


def test_the_parts_of_a_sync_in_which_training_stood_still() -> None:
    """It took 20 s: 10 to upload, 4 for the others, 3 for the coordinator, and the rest to download."""
    report = account(train=40, sync=20, upload=10, download=2.5, outer_step=0.5, await_delta=17, wait=1.5)
    assert waits_of("w", report, times()) == Waits(upload=10, workers=4, coordinator=3, download=3, opening=1.5)


def test_downloads_that_overlap_with_the_uploads_of_later_fragments() -> None:
    """Only the last one of two comes after the upload."""
    report = account(train=40, sync=19, upload=10, download=4, outer_step=0)
    assert waits_of("w", report, times()) == Waits(upload=10, workers=4, coordinator=3, download=2)


@pytest.mark.parametrize(
    ("waited", "expected"),
    [
        (0.5, Waits(download=0.5)),
        (2, Waits(download=1, coordinator=1)),
        (7, Waits(download=1, coordinator=3, workers=3)),
        (9, Waits(download=1, coordinator=3, workers=4, upload=1)),
    ],
)
def test_training_that_overlaps_waits_for_the_end_of_the_sync(waited: float, expected: Waits) -> None:
    report = account(train=40, sync=waited, upload=10, download=2)
    assert waits_of("w", report, times()) == expected


def test_the_last_worker_waits_for_no_other() -> None:
    report = account(train=40, sync=8, upload=4, download=1)
    assert waits_of("w", report, times(sent_at=114.5)).workers == 0
    assert waits_of("w", report, times(sent_at=114.5)).coordinator == 2.5


@pytest.mark.parametrize("known", [RoundTimes(2, None, None, {"w": 110.0}), RoundTimes(2, 114.0, 117.0, {})])
def test_a_worker_without_a_contribution_or_a_round_without_an_end(known: RoundTimes) -> None:
    report = account(train=40, sync=8, upload=4, download=1)
    assert waits_of("w", report, known) == Waits(upload=7, download=1)


def test_no_part_is_negative_and_together_they_are_what_the_worker_reported() -> None:
    report = account(train=40, sync=5, gather=1, upload=100, download=100, wait=2)
    for known in (times(), times(200, 100, 50), times(0, 1e9, 2e9)):
        found = waits_of("w", report, known)
        assert min(found.model_dump().values()) >= 0
        assert found.total_s == pytest.approx(8)


def test_what_would_save_some_of_it() -> None:
    """A worker that never waits trains on for at most 4 H steps, as it sends what it did during the last sync when the
    round opens. It does not train before that."""
    accounts = {"a": account(train=10, sync=5, wait=1), "b": account(train=1, sync=15)}
    waits = {worker: waits_of(worker, each, RoundTimes(1, None, None, {})) for worker, each in accounts.items()}
    found = waiting(accounts, waits, SyncSpec(rounds=1, wait="always"))
    assert found is not None
    assert found.share == pytest.approx(21 / 32)
    assert found.never == pytest.approx((5 + 4) / 32)
    assert found.doubled_h == pytest.approx(20 / 2 / 32)
    never = waiting(accounts, waits, SyncSpec(rounds=1, wait="never"))
    assert never is not None
    assert never.never is None
    assert waiting({}, {}, SyncSpec(rounds=1)) is None


@pytest.mark.parametrize(
    ("worker", "sent_at", "expected"),
    [
        ("slow", {"a": 100.0, "b": 104.0, "slow": 112.0}, 8),
        ("b", {"a": 100.0, "b": 104.0, "slow": 112.0}, 0),
        ("missing", {"a": 100.0, "b": 104.0}, 10),
        ("slow", {"a": 100.0, "slow": 112.0}, 9),
        ("alone", {"alone": 112.0}, 0),
    ],
    ids=["last", "not last", "did not come", "no longer than the others stood still", "alone"],
)
def test_a_worker_holds_a_round_up_while_only_it_is_missing_and_nobody_trains(
    worker: str, sent_at: dict[str, float], expected: float
) -> None:
    waits = {name: Waits(workers=9.0 if "b" not in sent_at else 12.0) for name in sent_at}
    assert held_s(worker, RoundTimes(1, 114.0, 117.0, sent_at), waits) == expected


def test_nobody_knows_how_long_until_another_worker_has_reported() -> None:
    times = RoundTimes(1, 114.0, 117.0, {"a": 100.0, "slow": 112.0})
    assert held_s("slow", times, {"slow": Waits()}) is None
    assert held_s("slow", RoundTimes(1, None, None, {"a": 100.0}), {"a": Waits()}) is None
