"""Workers that send the same are told of: they train on the same data, and nobody would know."""

from typing import Any

import pytest

from coordinator.aggregation.judging import Evidence, SimilarityHistory, judge
from harness.coordinator import InThread
from harness.member import Member
from tests.coordinator.crew import assigned, crew, events, info, step_all
from tests.coordinator.test_screening import honest, sketched

pytestmark = pytest.mark.slow


def play(members: list[Member], round_: int, sent: dict[str, Any], **losses: float | None) -> None:
    """A round in which each sends its own work, that of the member in `sent`, or the fragments there. `losses`: those
    that are not 1.5, by worker."""
    for member, assignment in zip(members, assigned(members, round_), strict=True):
        fragments = sent.get(member.name, member)
        if isinstance(fragments, Member):
            fragments = fragments.pseudo_gradients(round_)
        member.contribute_all(assignment, fragments, loss=losses.get(member.name, 1.5))
    step_all(members, round_)


@pytest.mark.covers("security:copied-contribution")
def test_workers_with_equal_work_are_told_of_once(shared: InThread, run: str) -> None:
    members = crew(shared, run, ["a", "b", "c", "d"], rounds=3)
    a, b, c, _ = members
    play(members, 0, {})
    play(members, 1, {"b": a, "d": c})
    play(members, 2, {"a": b, "d": c})
    told = events(shared, run, "equal")
    assert [event["data"] for event in told] == [
        {"round": 1, "fragment": 0, "workers": ["a", "b"]},
        {"round": 1, "fragment": 0, "workers": ["c", "d"]},
    ]
    assert told[0]["message"].startswith("round 1: a, b have sent the same contribution (loss 1.5, norm ")


def test_more_of_them_are_told_of_again(shared: InThread, run: str) -> None:
    members = crew(shared, run, ["a", "b", "c"], rounds=2)
    a, *_ = members
    play(members, 0, {"b": a})
    play(members, 1, {"b": a, "c": a})
    assert [event["data"]["workers"] for event in events(shared, run, "equal")] == [["a", "b"], ["a", "b", "c"]]


def test_equal_norms_alone_are_no_equal_work(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=1)
    play([a, b], 0, {"b": a}, a=1.25)
    assert events(shared, run, "equal") == []


def test_a_loss_that_nobody_told_is_unknown(shared: InThread, run: str) -> None:
    """And the mean is over those who have told theirs."""
    a, b = crew(shared, run, ["a", "b"], rounds=2)
    play([a, b], 0, {"b": a}, a=None, b=None)
    play([a, b], 1, {"b": a}, a=None)
    assert [info(shared, run, f"/rounds/{round_}")["loss"] for round_ in (0, 1)] == [None, 1.5]
    (told,) = events(shared, run, "equal")
    assert told["message"].startswith("round 0: a, b have sent the same contribution (norm ")


def test_another_dropout_seed_or_precision_hides_no_equal_work(shared: InThread, run: str) -> None:
    members = a, b, *_ = crew(shared, run, ["a", "b", "c", "d", "e"], rounds=4)
    for round_ in range(4):
        common = a.pseudo_gradients(100 + round_)
        sent = {each.name: each.pseudo_gradients(round_) for each in members}
        noise = b.pseudo_gradients(200 + round_)
        sent["b"] = [0.9 * own + 0.4 * more for own, more in zip(sent["a"], noise, strict=True)]
        whole = {name: [both + own for both, own in zip(common, each, strict=True)] for name, each in sent.items()}
        play(members, round_, whole, **{name: float(ord(name)) for name in sent})
    (told,) = events(shared, run, "equal")
    assert told["data"]["workers"] == ["a", "b"]


def test_no_honest_pair_is_taken_for_one() -> None:
    """Of many steps directions are less noisy, and so closer to each other than to those of few steps."""
    for cosine in (0.1, 0.4, 0.9, 0.99):
        similarity = SimilarityHistory()
        for round_ in range(12):
            vectors = honest(6, cosine, seed=round_)
            for few in (0, 1):
                vectors[few] = vectors[few] + honest(1, seed=1000 * round_ + few + 7)[0]
            evidence = {f"w{i}": Evidence(sketched(each), 1.0, 1.0) for i, each in enumerate(vectors)}
            assert similarity.update(judge(evidence).close, evidence) == []


def test_a_pair_is_forgotten_once_it_differs() -> None:
    similarity, pair, all_there = SimilarityHistory(), ("a", "b"), ["a", "b", "c", "d"]
    assert [similarity.update({pair: 0.3}, all_there) for _ in range(3)] == [[], [pair], [pair]]
    for _ in range(20):
        assert similarity.update({}, all_there) == []
    assert similarity.update({pair: 0.3}, all_there) == []
