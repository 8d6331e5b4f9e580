"""When fragments are sent and merged within a round."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.spec.sections import SyncSpec
from worker.rounds.schedule import ON_ARRIVAL, Schedule, schedule


def spec(**keys: Any) -> SyncSpec:
    return SyncSpec(rounds=5, **{"wait": "always", **keys})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, Schedule([12] * 3, [12] * 3)),
        ({"overlap": 5}, Schedule([7] * 3, [12] * 3)),
        ({"overlap": "eager"}, Schedule([0] * 3, [12] * 3)),
        ({"offsets": "spread"}, Schedule([4, 8, 12], [4, 8, 12])),
        ({"offsets": "spread", "overlap": 3}, Schedule([1, 5, 9], [4, 8, 12])),
        ({"offsets": "spread", "overlap": 6}, Schedule([0, 2, 6], [4, 8, 12])),
        ({"wait": "never"}, Schedule([12] * 3, [ON_ARRIVAL] * 3)),
    ],
)
def test_a_round_in_the_middle_of_the_run(keys: dict[str, Any], expected: Schedule) -> None:
    assert schedule(spec(inner_steps=12, **keys), 3, 12, last=False, first=False) == expected


def test_a_worker_that_is_behind_sends_at_once_if_it_never_waits() -> None:
    never = spec(inner_steps=12, wait="never")
    assert schedule(never, 2, 12, last=False, first=False, at_once=True) == Schedule([0] * 2, [ON_ARRIVAL] * 2)
    assert schedule(spec(inner_steps=12), 1, 12, last=False, first=False, at_once=True) == Schedule([12], [12])


def test_a_worker_that_has_nothing_yet_sends_half_way_what_is_due_at_once() -> None:
    assert schedule(spec(inner_steps=12, overlap="eager"), 2, 12, last=False, first=True).sent == [6, 6]
    spread = spec(inner_steps=12, offsets="spread", overlap=6)
    assert schedule(spread, 3, 12, last=False, first=True).sent == [2, 2, 6]


def test_the_last_round_leaves_nothing_over() -> None:
    for keys in ({"overlap": "eager"}, {"overlap": 5}, {"offsets": "spread"}, {"wait": "never"}):
        assert schedule(spec(inner_steps=12, **keys), 3, 12, last=True, first=False) == Schedule([12] * 3, [12] * 3)


@given(st.data())
def test_whatever_the_spec_says(data: st.DataObject) -> None:
    h, fragments = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 50))
    offsets = data.draw(st.sampled_from(["together", "spread"]))
    overlaps: st.SearchStrategy[int | str] = st.integers(0, h - 1)
    if offsets == "together":
        overlaps |= st.just("eager")
    sync = spec(inner_steps=h, offsets=offsets, overlap=data.draw(overlaps))
    first = data.draw(st.booleans())
    found = schedule(sync, fragments, h, last=data.draw(st.booleans()), first=first)
    assert len(found.sent) == len(found.merged) == fragments
    assert all(0 <= sent <= merged <= h for sent, merged in zip(found.sent, found.merged, strict=True))
    assert min(found.merged) >= 1
    assert found.merged[-1] == h
    assert found.merged == sorted(found.merged)
    if first:
        assert min(found.sent) >= 1
    else:
        assert found.sent == sorted(found.sent), "the line takes them in order"
