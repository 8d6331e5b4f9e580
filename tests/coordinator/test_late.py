"""Late contributions are told with how late they were, and divergences are counted."""

import pytest

from harness.coordinator import InThread, SettableClock
from tests.coordinator.crew import GRACE_OF_A_SECOND, assigned, crew, events, info, play_rounds, problem, take_part


@pytest.mark.slow
def test_the_rounds_record_says_who_was_late_and_by_how_much(shared: InThread, run: str, clock: SettableClock) -> None:
    a, b, c = crew(shared, run, ["a", "b", "c"], rounds=2, members=GRACE_OF_A_SECOND)
    *_, assignment = assigned([a, b, c], 0)
    take_part([a, b], 0)
    clock.advance(2)
    shared.coordinator.tick()
    a.step(0)
    assert info(shared, run, "/rounds/0")["late"] == []
    for _ in range(2):
        problem(c.contribute(assignment, 1, c.pseudo_gradients(0)[1]), "round-closed")
    (late,) = info(shared, run, "/rounds/0")["late"]
    assert (late["worker"], late["fragment"]) == ("c", 1)
    assert 0 <= late["late_s"] < 60
    assert info(shared, run, "/rounds/1")["late"] == []
    assert info(shared, run, "/workers/c")["contributions"] == 0


def test_a_divergence_is_counted_once_per_round_whatever_the_number_of_fragments(shared: InThread, run: str) -> None:
    a, b = crew(shared, run, ["a", "b"], rounds=2, min_workers=2)
    _, assignment = assigned([a, b], 0)
    for theta in b.theta:
        theta[0] += 1
    for p, values in enumerate(b.pseudo_gradients(0)):
        problem(b.contribute(assignment, p, values), "stale-base")
    assert info(shared, run)["divergences"] == 1
    assert info(shared, run, "/workers/b")["divergences"] == 1
    assert info(shared, run, "/workers/a")["divergences"] == 0
    assert len(events(shared, run, "diverged")) == 1
    for theta in b.theta:
        theta[0] -= 1
    play_rounds(shared, [a, b], [0])
    assert info(shared, run)["divergences"] == 1, "it was healed, and never averaged"
