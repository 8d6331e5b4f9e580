"""Messages: requests refuse what they do not know, replies take it, and both survive JSON."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from protocol import messages
from protocol.errors import PROBLEM_PREFIX, PROBLEMS, Problem
from protocol.fragments import TensorSpec, plan_fragments

DIGEST = "ab" * 32

GOLDEN: list[tuple[BaseModel, str]] = [
    (
        messages.JoinRequest(
            tensors=[TensorSpec(name="w", shape=[2, 3])],
            data=messages.DataSummary(digest=DIGEST, units=7),
            host={"gpus": 1},
        ),
        '{"tensors":[{"name":"w","shape":[2,3]}],"data":{"digest":"'
        + DIGEST
        + '","units":7},"previous":null,"member_token":null,"host":{"gpus":1}}',
    ),
    (
        messages.JoinRequest(tensors=[], frozen=messages.FrozenSummary(digest=DIGEST, elements=5)),
        '{"tensors":[],"data":null,"frozen":{"digest":"'
        + DIGEST
        + '","elements":5},"previous":null,"member_token":null,"host":{}}',
    ),
    (
        messages.JoinReply(
            worker="a",
            member_token="t",
            epoch=1,
            lease_s=60.0,
            layout=plan_fragments([TensorSpec(name="w", shape=[2, 3])], 4),
        ),
        '{"worker":"a","member_token":"t","epoch":1,"lease_s":60.0,"layout":{"tensors":[{"name":"w","shape":[2,3]}],'
        '"fragments":[[{"tensor":0,"start":0,"stop":3}],[{"tensor":0,"start":3,"stop":6}]]}}',
    ),
    (
        messages.Metrics(round=1, inner_step=2, loss=0.5, mfu=0.4, upload_bytes=3),
        '{"round":1,"inner_step":2,"loss":0.5,"tokens_per_second":null,"inner_steps_per_second":null,"mfu":0.4,'
        '"peak_memory_bytes":null,"learning_rate":null,"upload_bytes":3,"download_bytes":0,"phase":null}',
    ),
    (
        messages.AssignmentRequest(state_round=3, carried=[[4, 6]]),
        '{"state_round":3,"carried":[[4,6]],"report":null,"rows":null}',
    ),
    (
        messages.RoundReport(
            round=3, epoch=1, upload_bytes=5, download_bytes=7, seconds={messages.Stage.AWAIT_DELTA: 0.5}
        ),
        '{"round":3,"epoch":1,"upload_bytes":5,"download_bytes":7,"seconds":{"await-delta":0.5},"dropped_steps":0}',
    ),
    (
        messages.Assignment(
            action=messages.Action.TRAIN,
            reason="round 0 is open",
            round=0,
            schedule_steps=5,
            inner_steps=5,
            units=[[0, 5]],
        ),
        '{"action":"train","reason":"round 0 is open","round":0,"step":0,"schedule_steps":5,"inner_steps":5,'
        '"units":[[0,5]],"evaluate":false,"redone":0}',
    ),
    (
        messages.LeaseReply(directive=messages.Directive.STOP, reason="the run is finished", lease_s=60.0),
        '{"directive":"stop","reason":"the run is finished","lease_s":60.0}',
    ),
    (messages.EvaluationReport(loss=1.25, tokens=4096, bytes=17_000), '{"loss":1.25,"tokens":4096,"bytes":17000}'),
    (messages.TokenRequest(scope=messages.Scope.WORKER), '{"scope":"worker","note":""}'),
    (
        messages.TokenRequest(scope=messages.Scope.JOIN, run="r", expires_in_s=60, uses=3),
        '{"scope":"join","note":"","run":"r","expires_in_s":60.0,"uses":3}',
    ),
    (messages.RunChange(state="paused"), '{"state":"paused"}'),
    (
        messages.ContributionReply(round=1, fragment=0, digest=DIGEST, created=True),
        '{"round":1,"fragment":0,"digest":"' + DIGEST + '","created":true}',
    ),
    (
        messages.Page[messages.Event](items=[messages.Event(id=1, at=2.0, kind="k", message="m", data={})], next="1"),
        '{"items":[{"id":1,"at":2.0,"kind":"k","message":"m","data":{}}],"next":"1"}',
    ),
]


@pytest.mark.parametrize(("message", "text"), GOLDEN, ids=lambda value: type(value).__name__)
def test_golden_json(message: BaseModel, text: str) -> None:
    assert message.model_dump_json() == text
    assert type(message).model_validate_json(text) == message


BAD: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (messages.RunChange, {"state": "finished"}),
    (messages.DataSummary, {"digest": DIGEST.upper(), "units": 1}),
    (messages.DataSummary, {"digest": DIGEST, "units": 0}),
    (messages.Metrics, {"loss": "NaN"}),
    (messages.Metrics, {"round": -1}),
    (messages.Metrics, {"round": 1 << 63}),
    (messages.EvaluationReport, {"loss": float("inf"), "tokens": 1}),
    (messages.EvaluationReport, {"loss": 1.0, "tokens": 1, "bytes": 0}),
    (messages.TokenRequest, {"scope": "root"}),
    (messages.TokenRequest, {"scope": "viewer", "note": "x" * 201}),
    (messages.TokenRequest, {"scope": "viewer", "names": 1}),
    (messages.TokenRequest, {"scope": "worker", "uses": 1}),
    (messages.TokenRequest, {"scope": "worker", "expires_in_s": "inf"}),
    (messages.ExchangeRequest, {"token": "ost_short"}),
    (messages.JoinRequest, {"tensors": [{"name": "", "shape": []}]}),
    (messages.JoinRequest, {"tensors": [{"name": "w", "shape": [1.5]}]}),
]


@pytest.mark.parametrize(("kind", "document"), BAD)
def test_bad_requests(kind: type[BaseModel], document: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        kind.model_validate(document)


def test_requests_refuse_unknown_keys_and_replies_take_them() -> None:
    with pytest.raises(ValidationError, match="surprise"):
        messages.AssignmentRequest.model_validate({"state_round": 1, "surprise": 1})
    reply = {"directive": "continue", "reason": "", "lease_s": 1.0, "surprise": 1}
    assert messages.LeaseReply.model_validate(reply).directive == "continue"


def test_a_metric_that_is_not_known_yet_costs_no_lease() -> None:
    """A worker of a later version was refused its heartbeat, and with it the run, for a figure that is only shown."""
    newer = {"loss": 0.5, "watts": 350.0}
    assert messages.Metrics.model_validate(newer) == messages.Metrics(loss=0.5)
    assert messages.LeaveRequest.model_validate({"metrics": newer}).metrics.loss == 0.5
    with pytest.raises(ValidationError, match="loss"):
        messages.Metrics.model_validate({"loss": "low"})


@pytest.mark.parametrize("slug", PROBLEMS)
def test_a_problem_travels(slug: str) -> None:
    sent = Problem(slug, "round 3 is closed", retry_after_s=2.0, round=3)
    document = sent.document()
    assert document == {
        "type": PROBLEM_PREFIX + slug,
        "title": PROBLEMS[slug].title,
        "status": int(PROBLEMS[slug].status),
        "detail": "round 3 is closed",
        "round": 3,
    }
    received = Problem.from_document(document, retry_after_s=2.0)
    assert (received.slug, received.detail, received.members, received.status) == (
        slug,
        sent.detail,
        {"round": 3},
        sent.status,
    )
    assert str(received) == f"{slug}: round 3 is closed"


@pytest.mark.parametrize("document", [{}, {"type": "about:blank", "detail": ""}, {"type": PROBLEM_PREFIX + "internal"}])
def test_problems_of_others_are_told_apart(document: dict[str, Any]) -> None:
    with pytest.raises(KeyError):
        Problem.from_document(document)


def test_only_known_problems_are_raised() -> None:
    with pytest.raises(KeyError, match="no-such"):
        Problem("no-such", "")
