"""Workers that send the same are told of: they train on the same data, and nobody would know."""

from benchmarks.harness.coordinator import InThread
from benchmarks.harness.member import Member
from tests.coordinator.crew import crew, events, info


def play(members: list[Member], round_: int, like: dict[str, Member]) -> None:
    """A round in which each sends its own work, or what another does, by name in `like`."""
    assignments = [member.assignment(round_) for member in members]
    for member, assignment in zip(members, assignments, strict=True):
        values = like.get(member.name, member).pseudo_gradients(round_)
        for p, each in enumerate(values):
            member.contribute(assignment, p, each).raise_for_status()
    for member in members:
        member.step(round_)


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
    assert told[0]["message"].startswith("round 1: a, b have sent the same (loss 1.5, norm ")


def test_more_of_them_are_told_of_again(shared: InThread, run: str) -> None:
    members = crew(shared, run, ["a", "b", "c"], rounds=2)
    a, *_ = members
    play(members, 0, {"b": a})
    play(members, 1, {"b": a, "c": a})
    assert [event["data"]["workers"] for event in events(shared, run, "equal")] == [["a", "b"], ["a", "b", "c"]]


def test_equal_norms_alone_are_no_equal_work(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=1)
    assignments = [member.assignment(0) for member in (a, b)]
    for p, values in enumerate(a.pseudo_gradients(0)):
        a.contribute(assignments[0], p, values, loss=1.25).raise_for_status()
        b.contribute(assignments[1], p, values, loss=1.5).raise_for_status()
    a.step(0)
    assert events(shared, run, "equal") == []


def test_a_loss_that_nobody_told_is_unknown(shared: InThread, run: str) -> None:
    """And the mean is over those who have told theirs."""
    a, b = crew(shared, run, ["a", "b"], rounds=2)
    for round_, losses in enumerate(((None, None), (None, 1.5))):
        assignments = [member.assignment(round_) for member in (a, b)]
        for member, assignment, loss in zip((a, b), assignments, losses, strict=True):
            for p, values in enumerate(a.pseudo_gradients(round_)):
                member.contribute(assignment, p, values, loss=loss).raise_for_status()
        for member in (a, b):
            member.step(round_)
    assert [info(shared, run, f"/rounds/{round_}")["loss"] for round_ in (0, 1)] == [None, 1.5]
    (told,) = events(shared, run, "equal")
    assert told["message"].startswith("round 0: a, b have sent the same (norm ")
