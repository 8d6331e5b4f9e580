"""One token, one voice: many names of it neither close rounds on themselves nor hold them up."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.coordinator import InThread, SettableClock
from harness.member import Member, spec_toml
from protocol.messages import Scope
from protocol.wire import DeltaHeader, Payload
from tests.coordinator.crew import GRACE_OF_A_SECOND, info, ready, recovered
from tests.coordinator.test_restart import Lives

pytestmark = pytest.mark.slow

SYBILS = ["m1", "m2", "m3", "m4"]
HONEST = ["h1", "h2"]


def joined(running: InThread, run: str, tokens: dict[str, str], **spec: Any) -> dict[str, Member]:
    """A run and its members, each with the token given, which all hold state 0."""
    running.create_run(spec_toml(run, rounds=9, min_workers=2, members=GRACE_OF_A_SECOND, **spec))
    members = {name: Member(running.client(), run, name) for name in tokens}
    for name, member in members.items():
        member.join(tokens[name])
    seeder = members[min(members)]
    assert seeder.assignment(None).action == "seed"
    seeder.seed()
    return {name: recovered(member) for name, member in members.items()}


def four_of_one_token_and_two_honest(running: InThread, run: str, **spec: Any) -> dict[str, Member]:
    many = running.token(Scope.WORKER, names=4)
    own = {name: running.token(Scope.WORKER, names=1) for name in HONEST}
    return joined(running, run, dict.fromkeys(SYBILS, many) | own, **spec)


def send(member: Member, round_: int, factor: float = 1.0) -> None:
    assignment = member.assignment(round_)
    for p, values in enumerate(member.pseudo_gradients(round_)):
        member.contribute(assignment, p, (values * factor).astype(np.float32)).raise_for_status()


def contributors(member: Member, round_: int) -> list[str]:
    header = Payload.from_bytes(member.delta(round_, 0).raise_for_status().content).header
    assert isinstance(header, DeltaHeader)
    return [each.worker for each in header.contributors]


@pytest.mark.covers("reliability:hostile-worker", "security:many-names-one-token")
@pytest.mark.parametrize("leave", [False, True], ids=["and stay", "and leave at once"])
def test_zeros_of_four_names_close_no_round_on_themselves(
    shared: InThread, run: str, clock: SettableClock, leave: bool
) -> None:
    """All rounds once closed on them: no honest contribution was in any."""
    members = four_of_one_token_and_two_honest(shared, run, sync='aggregation = "mean"')
    for round_ in range(3):
        ready(members.values(), round_)
        for name in SYBILS:
            send(members[name], round_, 0.0)
            if leave and round_ == 2:
                members[name].http.delete(members[name].path()).raise_for_status()
        clock.advance(30)  # far beyond the grace
        for name in HONEST + (SYBILS if not leave or round_ < 2 else []):
            members[name].http.put(members[name].path("/lease"), json={}).raise_for_status()
        shared.coordinator.tick()
        assert info(shared, run)["round"] == round_
        send(members["h1"], round_)
        if round_ == 1:  # one of them is slow: it has the grace
            clock.advance(2)
            shared.coordinator.tick()
        else:
            send(members["h2"], round_)
        honest = ["h1"] if round_ == 1 else HONEST
        assert contributors(members["h1"], round_) == sorted(SYBILS + honest)
        for name, member in members.items():
            if not (leave and round_ == 2 and name in SYBILS):
                member.step(round_)


def test_four_names_that_send_nothing_hold_up_two_honest_workers_for_no_longer_than_the_grace(
    shared: InThread, run: str, clock: SettableClock
) -> None:
    """They are most of the workers, and have contributed before."""
    members = four_of_one_token_and_two_honest(shared, run)
    for round_ in range(2):
        ready(members.values(), round_)
        for name in HONEST if round_ else members:
            send(members[name], round_)
        if round_:
            reason = info(shared, run, f"/rounds/{round_}")["fragments"][0]["reason"]
            assert reason == "waiting for 4 of 6 workers (m1, m2, m3 and 1 more); closes in 1 s"
            clock.advance(1)
            shared.coordinator.tick()
            assert contributors(members["h1"], round_) == HONEST
        for member in members.values():
            member.step(round_)


def test_a_restart_knows_whose_the_contributions_are_also_of_workers_that_have_left(tmp_path: Path) -> None:
    lives = Lives(tmp_path / "data")
    with lives.life() as running:
        members = four_of_one_token_and_two_honest(running, "r")
        ready(members.values(), 0)
        for name in SYBILS:
            send(members[name], 0)
            members[name].http.delete(members[name].path()).raise_for_status()
    with lives.life() as running:
        owners = running.live("r").members.owners
        assert len({owners[name] for name in SYBILS}) == 1
        assert info(running, "r", "/rounds/0")["fragments"][0]["closes_in_s"] > 14_000, "no quorum, only the cap"
