"""Messages: requests refuse what they do not know, replies take it."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from protocol import messages
from protocol.errors import PROBLEM_PREFIX, PROBLEMS, Problem

DIGEST = "ab" * 32


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
