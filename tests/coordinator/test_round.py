"""Whole rounds over real HTTP, with members that have no model: the numpy reference on both sides."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.coordinator import InThread, coordinator_thread
from harness.member import Member, spec_toml
from protocol.messages import Scope
from tests.coordinator.crew import play_round


@pytest.fixture
def running(tmp_path: Path) -> Iterator[InThread]:
    with coordinator_thread(tmp_path / "data") as running:
        yield running


def join_all(running: InThread, run: str, names: list[str]) -> list[Member]:
    token = running.token(Scope.WORKER)
    members = [Member(running.client(), run, name) for name in names]
    for member in members:
        member.join(token)
    assert members[0].assignment(None).action == "seed"
    members[0].seed()
    for member in members[1:]:
        assert member.assignment(None).action == "recover"
        for theta in member.theta:
            theta[:] = 0.5
    return members


@pytest.mark.parametrize(
    ("upload", "download"),
    [("fp32", "fp32"), ("bf16", "bf16"), ("int8", "int8"), ("int4", "int4"), ("2bit", "int8"), ("ternary", "int4")],
)
def test_two_workers_and_the_coordinator_hold_the_same_state_after_three_rounds(
    running: InThread, upload: str, download: str
) -> None:
    codecs = f'upload_codec = "{upload}"\ndownload_codec = "{download}"'
    running.create_run(spec_toml(rounds=3, min_workers=2, sync=codecs))
    members = join_all(running, "r", ["w1", "w0"])
    for round_ in range(3):
        assert [member.assignment(round_).action for member in members[:1]] == ["wait"] or round_ > 0
        play_round(members, round_)
    running.await_state("r", 3)
    info = running.client().get("/v1/runs/r").json()
    assert (info["state"], info["round"]) == ("finished", 3)
    checkpoint = running.client().get("/v1/runs/r/checkpoints/3").json()
    for p in range(len(members[0].theta)):
        assert members[0].base(p) == members[1].base(p)
        assert checkpoint["fragments"][p]["state_digest"] == members[0].base(p).hex()
