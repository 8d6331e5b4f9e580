"""Following a run, against a coordinator whose history is written out here."""

from typing import Any

import httpx
import pytest

from outerstep.follow import follow
from protocol.errors import Problem, Transient
from tests.outerstep.examples import (
    History,
    event_document,
    rollback_document,
    round_document,
    run_document,
)


def moment(round_number: int, events: int, state: str = "running") -> dict:
    open_rounds = [round_document(round_number, state="collecting", closed_at=None)] if state == "running" else []
    return {
        "run": run_document(state=state, round=round_number),
        "rounds": open_rounds + [round_document(number) for number in reversed(range(round_number))],
        "events": [event_document(number + 1) for number in range(events)],
    }


def no_sleep(_: float) -> None:
    raise AssertionError("there was nothing to sleep for")


WAITING: Any = {"patience_s": 1, "sleep": no_sleep}


def test_looks_tell_what_is_new_until_the_end():
    history = History(moment(1, 2), moment(2, 2), moment(4, 5, "finished"))
    looks = list(follow(history.client(), "demo", **WAITING))
    assert [[item.round for item in look.rounds] for look in looks] == [[0, 1], [1, 2], [2, 3]]
    assert [[event.id for event in look.events] for look in looks] == [[1, 2], [], [3, 4, 5]]
    assert [look.ended for look in looks] == [False, False, True]
    assert history.waited_after == ["2", "2"]


def test_what_workers_waited_for_is_of_the_last_round_that_they_have_reported():
    """A round is asked about until all its contributors have reported."""
    history = History(moment(2, 2), moment(3, 2), moment(3, 3), moment(3, 4), moment(4, 5, "finished"))
    waiting = {"share": 0.25, "never": 0.2, "doubled_h": 0.1}
    reports = {"a": {"workers": 3.0}, "b": {"upload": 1.0}}
    found = []
    for number, seen in enumerate(follow(history.client(), "demo", **WAITING)):
        found.append(None if seen.reported is None else (seen.reported.round, sorted(seen.reported.waits)))
        if number == 1:  # then only one of two has reported round 2
            history.reported[2] = {"waits": {"a": reports["a"]}, "waiting": waiting}
        if number == 2:
            history.reported[2] = {"waits": reports, "waiting": waiting}
    assert found == [None, None, (2, ["a"]), (2, ["a", "b"]), (2, ["a", "b"])]
    assert history.detailed == [1, 2, 2, 2, 3]


@pytest.mark.parametrize("gone_on_to", [2, 4, 6])
def test_a_run_that_was_rolled_back_is_told_from_there_however_far_it_has_gone_since(gone_on_to: int):
    back = moment(gone_on_to, 2)
    back["events"].append(rollback_document(3, 2))
    looks = list(follow(History(moment(4, 2), back, moment(7, 3, "finished")).client(), "demo", **WAITING))
    assert [item.round for item in looks[1].rounds] == list(range(2, gone_on_to + 1))
    assert [look.rolled_back_to for look in looks] == [None, 2, None]


def test_a_run_that_has_ended_is_looked_at_once():
    assert len(list(follow(History(moment(4, 5, "stopped")).client(), "demo", **WAITING))) == 1


def test_only_the_last_rounds_of_a_long_history_are_read():
    [look] = follow(History(moment(30, 0, "finished")).client(), "demo", **WAITING)
    assert [item.round for item in look.rounds] == list(range(10, 30))


def test_an_outage_is_waited_for_ever_longer_and_nothing_is_missed():
    outage = [httpx.ConnectError("refused")] * 6
    history = History(moment(1, 2), *outage, moment(3, 4), moment(4, 5, "finished"))
    slept: list[float] = []
    looks = list(follow(history.client(), "demo", patience_s=1, sleep=slept.append))
    assert slept == [1, 2, 4, 8, 10, 10]
    assert [look.trouble is not None for look in looks] == [False, *[True] * 6, False, False]
    assert all("cannot reach the coordinator" in str(look.trouble) for look in looks[1:7])
    assert [[item.round for item in look.rounds] for look in looks[-2:]] == [[1, 2, 3], [3]]
    assert [[event.id for event in look.events] for look in looks[-2:]] == [[3, 4], [5]]


def test_the_first_look_must_succeed():
    with pytest.raises(Transient):
        next(follow(History(httpx.ConnectError("refused")).client(), "demo", **WAITING))


def test_a_refusal_ends_it():
    history = History(moment(1, 0), Problem("unauthorized", "this token was revoked"))
    looks = follow(history.client(), "demo", **WAITING)
    assert next(looks).trouble is None
    with pytest.raises(Problem, match="this token was revoked"):
        next(looks)
