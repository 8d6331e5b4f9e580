"""JSON of strangers: what is too much is refused soon, and in a few words."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter

from coordinator.api.workers import ASSIGNMENT_VALUES, JOIN_VALUES
from coordinator.http import bodies
from coordinator.http.bodies import MAX_MEMBERS, parse
from harness.coordinator import InThread
from harness.member import TENSORS, Member, spec_toml
from protocol.errors import Problem
from protocol.fragments import TensorSpec
from protocol.messages import MAX_TENSORS, AssignmentRequest, JoinRequest, Scope
from protocol.wire import MAX_UNIT_RANGES
from tests.coordinator.crew import crew, problem
from tests.support.waiting import PATIENCE_S

JOIN: TypeAdapter[Any] = TypeAdapter(JoinRequest)
TENSOR = b'{"name":"a","shape":[1,2]}'


def join_of(*tensors: bytes, rest: bytes = b"") -> bytes:
    return b'{"tensors":[' + b",".join(tensors) + b"]" + rest + b"}"


def faults(body: bytes) -> list[Any]:
    with pytest.raises(RequestValidationError) as caught:
        parse(body, JOIN, JOIN_VALUES)
    return list(caught.value.errors())


@pytest.mark.slow
def test_the_largest_messages_are_taken() -> None:
    largest = join_of(*(b'{"name":"model.layers.%d.weight","shape":[1,2,3,4]}' % n for n in range(MAX_TENSORS)))
    assert len(largest) < 16 << 20
    assert len(parse(largest, JOIN, JOIN_VALUES).tensors) == MAX_TENSORS
    carried = [(2 * number, 2 * number + 1) for number in range(MAX_UNIT_RANGES)]
    asked = json.dumps({"carried": carried}).encode()
    assert len(parse(asked, TypeAdapter(AssignmentRequest), ASSIGNMENT_VALUES).carried) == MAX_UNIT_RANGES


@pytest.mark.covers("security:object-flood")
@pytest.mark.parametrize(
    "body",
    [b"[" + b"{}," * 1_000_000 + b"{}]", b"{" + b",".join(b'"%d":1' % n for n in range(1_000_000)) + b"}"],
    ids=["objects", "members"],
)
def test_a_million_values_are_refused_before_they_are_parsed(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*_: Any, **__: Any) -> None:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(json, "loads", loads)
    with pytest.raises(Problem, match=f"payload-too-large: a message has at most {JOIN_VALUES} values here"):
        parse(body, JOIN, JOIN_VALUES)


@pytest.mark.slow
def test_a_list_ends_at_its_first_fault() -> None:
    assert len(faults(join_of(TENSOR, *[b"{}"] * 10_000))) == 2  # its name and its shape are missing
    assert len(faults(join_of(*[b"1"] * 10_000))) == 1
    assert [each["type"] for each in faults(join_of(*[TENSOR] * (MAX_TENSORS + 1)))] == ["too_long"]


def test_an_object_of_many_members_is_refused_wherever_it_is() -> None:
    wide = b"{" + b",".join(b'"%d":1' % number for number in range(MAX_MEMBERS + 1)) + b"}"
    for body in (wide, join_of(wide), join_of(rest=b',"host":' + wide)):
        with pytest.raises(Problem, match="invalid-message: .* 65 members"):
            parse(body, JOIN, JOIN_VALUES)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"tensors": ' + b"9" * 10_000 + b"}", "not JSON"),
        (b'{"tensors": "\xff"}', "not JSON"),
        (b"{", r"at character \d"),
    ],
    ids=["deep", "a long number", "no UTF-8", "cut"],
)
def test_what_is_no_json_is_refused_in_words(body: bytes, said: str) -> None:
    with pytest.raises(Problem, match=f"invalid-message: .*{said}"):
        parse(body, JOIN, JOIN_VALUES)


def test_a_refusal_does_not_repeat_a_long_value(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    with shared.client() as admin:
        for value in ('"' + "x" * 1_000_000 + '"', "[" + "0," * 100_000 + "0]"):
            content = b'{"tensors": [], "previous": %s}' % value.encode()
            headers = {"Content-Type": "application/json"}
            refused = admin.put(f"/v1/runs/{run}/workers/w", content=content, headers=headers)
            assert len(problem(refused, "invalid-message")["detail"]) < 500


def test_only_json_is_json(shared: InThread) -> None:
    with shared.client() as admin:
        for kind in ({}, {"Content-Type": "text/plain"}):
            refused = admin.post("/v1/tokens", content=b'{"scope": "viewer"}', headers=kind)
            assert "Content-Type: application/json" in problem(refused, "invalid-message")["detail"]
        for kind in ({"Content-Type": "application/json; charset=utf-8"}, {"Content-Type": "application/x+json"}):
            assert admin.post("/v1/tokens", content=b'{"scope": "viewer"}', headers=kind).status_code == 201


@pytest.mark.slow
def test_who_may_not_join_cannot_send_a_large_join(shared: InThread, run: str) -> None:
    shared.create_run(spec_toml(run))
    large = join_of(*[TENSOR] * 1000)
    headers = {"Content-Type": "application/json"}
    with shared.client(shared.token(Scope.VIEWER)) as viewer:
        refused = viewer.put(f"/v1/runs/{run}/workers/w", content=large, headers=headers)
        assert "at most 16384 bytes" in problem(refused, "forbidden")["detail"]


@pytest.mark.covers("security:object-flood")
def test_a_heartbeat_is_answered_while_a_large_join_is_parsed(
    shared: InThread, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of eight megabytes stopped everything for 24 s."""
    (member,) = crew(shared, run, ["a"])
    begun, go_on = threading.Event(), threading.Event()

    def parse_large_ones_late(body: bytes, *rest: Any) -> Any:
        if len(body) > bodies.MESSAGE_BYTES:
            begun.set()
            assert go_on.wait(PATIENCE_S)
        return parse(body, *rest)

    token = shared.token(Scope.WORKER)
    monkeypatch.setattr(bodies, "parse", parse_large_ones_late)
    other = Member(shared.client(), run, "b", [*TENSORS, *(TensorSpec(name=str(n), shape=[1]) for n in range(1000))])
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(other.ask_to_join, token)
        assert begun.wait(PATIENCE_S)
        assert member.http.put(member.path("/lease"), json={}).status_code == 200
        go_on.set()
        problem(joining.result(), "model-mismatch")


@pytest.mark.covers("security:huge-dimensions")
@pytest.mark.parametrize("digits", [19, 4000])
def test_a_dimension_beyond_all_models_is_refused(shared: InThread, run: str, digits: int) -> None:
    """Sixteen of 4,000 digits were a number that Python refuses to print, in the middle of the refusal."""
    shared.create_run(spec_toml(run))
    shape = b",".join([b"9" * digits] * 16)
    content = join_of(b'{"name":"a","shape":[%s]}' % shape)
    with shared.client() as admin:
        refused = admin.put(f"/v1/runs/{run}/workers/w", content=content, headers={"Content-Type": "application/json"})
    detail = problem(refused, "invalid-message")["detail"]
    assert "tensors.0.shape.0" in detail
    assert len(detail) < 500
