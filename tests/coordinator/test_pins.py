"""What a spec pins is not the first worker's to settle: a one-element model, other data, another state 0."""

import pytest

from harness.coordinator import InThread
from harness.member import DATA, TENSORS, Member, spec_toml
from protocol.digest import model_digest
from protocol.errors import SpecError
from protocol.fragments import TensorSpec
from protocol.messages import FrozenSummary
from protocol.spec.run import parse_spec
from tests.coordinator.crew import crew, enlist, events, info, problem

LAYOUT = parse_spec(spec_toml()).sync.plan_layout(TENSORS).digest().hex()
OTHER = "cd" * 32


def pins(**keys: str) -> str:
    return "\n".join(f'{key} = "{value}"' for key, value in keys.items())


@pytest.mark.covers("security:hostile-first-worker")
def test_a_layout_that_is_not_the_pinned_one_locks_nobody_out(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run, pins=pins(layout=LAYOUT, data=str(DATA.digest))))
    hostile = Member(shared.client(), run, "m", tensors=[TensorSpec(name="a", shape=[1])])
    detail = problem(hostile.ask_to_join(), "pin-mismatch")["detail"]
    assert f"pins.layout = {LAYOUT}, here it is " in detail
    assert info(shared, run, "/workers")["items"] == []
    assert enlist(shared, run, "w").joined.layout.elements == [488, 489]


@pytest.mark.parametrize("key", ["layout", "data", "frozen"])
def test_who_brings_something_else_is_refused(shared: InThread, run: str, key: str) -> None:
    shared.create_run(spec_toml(run, pins=pins(**{key: OTHER})))
    frozen = FrozenSummary(digest="ab" * 32, elements=5)
    refused = Member(shared.client(), run, "w").ask_to_join(frozen=frozen)
    assert f"pins.{key} = {OTHER}, here it is " in problem(refused, "pin-mismatch")["detail"]


def test_who_has_nothing_of_what_is_pinned_is_refused(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run, pins=pins(frozen=OTHER)))
    assert "here it is none" in problem(Member(shared.client(), run, "w").ask_to_join(), "pin-mismatch")["detail"]


@pytest.mark.covers("security:hostile-first-worker")
def test_another_state_0_is_refused_and_somebody_else_is_asked(shared: InThread, run: str) -> None:
    (probe,) = crew(shared, f"{run}-probe", ["p"])
    halves = model_digest([probe.base(0), probe.base(1)]).hex()
    shared.create_run(spec_toml(run, pins=pins(state=halves)))
    m, w = enlist(shared, run, "m"), enlist(shared, run, "w")
    assert m.assignment(None).action == "seed"
    m.seed_fragment(0, 3.0).raise_for_status()
    assert f"pins.state = {halves}" in problem(m.seed_fragment(1, 3.0), "pin-mismatch")["detail"]
    (event,) = events(shared, run, "seeder-refused")
    assert event["data"] == {"worker": "m"}
    assert m.assignment(None).action == "wait"
    assert w.assignment(None).action == "seed"
    w.seed(0.5)
    assert info(shared, run)["state"] == "running"


def test_what_is_everybodys_own_cannot_be_pinned() -> None:
    with pytest.raises(SpecError, match="pins.data: with data.private"):
        parse_spec(spec_toml(data="private = true", pins=pins(data=OTHER)))
    with pytest.raises(SpecError, match="pins.layout"):
        parse_spec(spec_toml(pins=pins(layout="abc")))
